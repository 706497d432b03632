"""What a run's speed is compared with: the device's peak where it is known, else the base's bare forward, timed once.

Nothing here changes what is trained: a forward without gradients draws no random numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import nn

from medusa.base_model import BaseModel

from .batching import collate, shard
from .step import Run
from .throughput import Throughput, peak_flops

MIN_BATCHES = 400  # of a run, for four bare forwards to be about 1% of it at most
QUICK_S = 0.5  # a first forward faster than this is only a warm-up


def choose_throughput(run: Run, base: BaseModel, console: Console | None) -> Throughput:
    """Times the base on the run's first batch only where no peak is known and the run is long enough for that not to
    matter. To be called by all processes together."""
    config, device, num_processes = run.config, run.processes.device, run.processes.world_size
    is_cached = config.train.cache_hidden_states
    base_flops, head_flops = model_flops(base.model, run.state.heads, config.heads.num_heads, is_cached)
    if run.joint:
        base_flops *= 2  # the way back, to the adapter; the base's own weights have no gradients
    peak = None if is_mixture_of_experts(base.config) else peak_flops(device, config.model.dtype)
    if peak is not None:
        return Throughput(device, base_flops, head_flops, peak_flops=peak * num_processes)
    rate = None
    [indices, *_] = run.plan.batches(0)
    is_long = run.plan.total_steps * config.optim.gradient_accumulation >= MIN_BATCHES
    if is_long and len(indices) >= num_processes:
        rate = _forward_rate(run, base, indices)
        if console:
            console.print(
                f"bare forward   {rate:,.0f} tokens/s of the base alone, by which speed is judged here", highlight=False
            )
    return Throughput(device, base_flops, head_flops, forward_tokens_per_second=rate)


def _forward_rate(run: Run, base: BaseModel, indices: list[int]) -> float:
    processes = run.processes
    examples = [run.examples[i] for i in shard(indices, processes.rank, processes.world_size)]
    batch = collate(examples).to(processes.device)

    def total(value: float) -> float:
        return processes.reduce(torch.tensor([value], dtype=torch.float64, device=processes.device)).item()

    return measure_forward(
        lambda: base.hidden_states(batch.input_ids, batch.attention_mask), sum(map(len, examples)), total
    )


def measure_forward(forward: Callable[[], object], tokens: int, total: Callable[[float], float]) -> float:
    """Tokens/s of `forward`, a bare forward of the base on this process's `tokens`, over all processes.

    One call, and where that is quick three more, of which the median counts. `total`: sums over processes, all of
    which thereby make the same number of calls.
    """
    first = _seconds(forward)
    is_quick = total(first) < QUICK_S
    return total(tokens / (statistics.median(_seconds(forward) for _ in range(3)) if is_quick else first))


@torch.no_grad()
def _seconds(forward: Callable[[], object]) -> float:
    _synchronize()
    began = time.perf_counter()
    forward()
    _synchronize()
    return time.perf_counter() - began


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def model_flops(base_model: Any, heads: nn.Module, num_heads: int, is_cached: bool) -> tuple[float, float]:
    """(of the base per token, of one head per label) by the usual count of 2 a parameter and pass.

    The base: 2 x its parameters (forward only; embeddings multiply nothing, and its lm_head is not run), 0 where its
    hidden states are read from disk. A head: 6 x its parameters, its projection included (forward 2, backward 4); a
    projection that is shared and frozen has no gradient of its own: 4. Attention's products over the sequence and
    teachers' logits are left out, so that MFU is rather too low than too high.
    """
    embeddings = {id(layer.weight) for layer in (base_model.get_input_embeddings(), base_model.get_output_embeddings())}
    base = sum(p.numel() for p in base_model.parameters() if id(p) not in embeddings)
    per_head = sum(p.numel() for p in heads.parameters() if p.requires_grad) / num_heads
    shared: nn.Module | None = getattr(heads, "shared_projection", None)
    frozen = shared.weight.numel() if shared is not None else 0  # type: ignore[operator]
    return 0.0 if is_cached else 2.0 * base, 6.0 * per_head + 4.0 * frozen


def is_mixture_of_experts(config: Any) -> bool:
    """Only some of such a base's parameters work on a token: the count above would be far too high."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)
