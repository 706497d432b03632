"""How fast training is for the hardware it runs on: tokens/s, MFU or the share of the base's bare forward, and memory.

Arithmetic on counters only; what is to be known beforehand is forward_speed.py's.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

# Dense bfloat16 FLOP/s by what the device's name contains, as vendors state them (without sparsity); first match wins.
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "B100": 1.75e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 154.8e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # of each of its two dies, which are two devices
}
HALF_PRECISION = ("bfloat16", "float16")


@dataclass(frozen=True)
class Throughput:
    """`base_flops`: of the base, per token. `head_flops`: of one head, forward and backward, per label it predicts.
    `peak_flops`: of all devices, per second; None: unknown. `forward_tokens_per_second`: of the base alone, over all
    processes; None: not measured."""

    device: torch.device
    base_flops: float
    head_flops: float
    peak_flops: float | None = None
    forward_tokens_per_second: float | None = None

    def measures(self, tokens: int, labels: float, seconds: float) -> dict[str, Any]:
        """`tokens` trained on and `labels` predicted, both over all processes, in `seconds`. Returns
        `tokens_per_second`; `mfu` or `share_of_forward` (both shares, the latter above 1 with hidden states read from
        disk) where known; and `peak_memory_bytes` of this process (see `peak_memory`)."""
        seconds = max(seconds, 1e-9)
        found: dict[str, Any] = {"tokens_per_second": tokens / seconds}
        if self.peak_flops is not None:
            found["mfu"] = (tokens * self.base_flops + labels * self.head_flops) / seconds / self.peak_flops
        elif self.forward_tokens_per_second is not None:
            found["share_of_forward"] = tokens / seconds / self.forward_tokens_per_second
        return found | {"peak_memory_bytes": peak_memory(self.device)}

    def status(self, tokens: int, labels: float, seconds: float) -> str:
        """The same in a few words, for the progress line."""
        found = self.measures(tokens, labels, seconds)
        parts = [f"{found['tokens_per_second']:,.0f} tokens/s"]
        if "mfu" in found:
            parts.append(f"MFU {found['mfu']:.1%}")
        if "share_of_forward" in found:
            parts.append(f"{found['share_of_forward']:.2f} of the bare forward")
        return ", ".join([*parts, f"peak {found['peak_memory_bytes'] / 1e9:.1f} GB"])


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of one device in half precision; None for CPUs, unknown GPUs, and float32."""
    if device.type != "cuda" or dtype not in HALF_PRECISION:
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    words = f" {name.replace('-', ' ')} ".lower()
    return next((peak for part, peak in PEAK_FLOPS.items() if f" {part.lower()} " in words), None)


def peak_memory(device: torch.device) -> int:
    """Bytes, at their peak: those of tensors on a GPU, else what is resident of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
