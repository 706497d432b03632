"""What a training run is at a step boundary, and its checkpoint: one safetensors file, replaced atomically.

Batches and learning rates are pure functions of the step, and nothing else draws random numbers, so parameters, the
optimizer's moments, the step and the counters are all there is: going on from a checkpoint is bitwise the same run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from medusa.checkpoint import write_atomically
from medusa.heads import Heads

from .joint import Adapter
from .optimizer import RunOptimizer

# Settings that may change between a run and its continuation without changing the heads that come out.
FREE_SETTINGS = {
    "train.output_dir",
    "train.log_every",
    "train.save_every",
    "train.cache_hidden_states",
    "train.keep_hidden_states",
    "train.trackers",
    "train.tracker_project",
    "data.on_bad_record",
    "joint.save_merged",
    "optim.batch_size",  # a batch of all processes is part of the identity instead
    "data.path",  # a fingerprint of the tokens, and the weights, are
    "data.num_workers",
    "data.streaming",
}


@dataclass
class Counters:
    """Totals since the start, over all processes. `seconds`: of training, interruptions left out. `best_*`: of the
    evaluation with the highest simulated tau so far."""

    step: int = 0
    tokens: int = 0
    labels: int = 0
    seconds: float = 0.0
    empty_steps: int = 0
    stop_reason: str | None = None
    best_tau: float = 0.0
    best_step: int = 0
    evaluations_since_best: int = 0


@dataclass
class Window:
    """What happened since the last line of metrics. `sums`: float64 [K, NUM_SUMS]. `base_sums`: float64 [2], see
    step.py. `loss`: sum over steps."""

    sums: Tensor
    base_sums: Tensor
    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


WINDOW_TENSORS = ("sums", "base_sums")


@dataclass
class TrainState:
    """`adapter`: the base's, in Medusa-2."""

    heads: Heads
    optimizer: RunOptimizer
    window: Window
    adapter: Adapter | None = None
    counters: Counters = field(default_factory=Counters)

    def parameters(self) -> list[nn.Parameter]:
        """All that are trained."""
        adapted = [parameter for _, parameter in self.adapter.named_parameters()] if self.adapter else []
        return [*self.heads.parameters(), *adapted]

    def tensors(self) -> dict[str, Tensor]:
        """What makes the trained model: `heads.*` and, in Medusa-2, `adapter.*`. On the CPU, no copies there."""
        parts = {"heads": self.heads.state_dict(), "adapter": self.adapter.tensors() if self.adapter else {}}
        named = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.heads.load_state_dict(_part(tensors, "heads."), strict=True)
        if self.adapter:
            self.adapter.load(_part(tensors, "adapter."))


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def save_state(path: Path, state: TrainState, identity: dict[str, Any], writes: bool = True) -> None:
    """`identity`: settings and fingerprints that a continuation must share (flat, JSON). All processes call it, for
    the optimizer's state may have to be gathered; one of them writes."""
    optimizer_state = state.optimizer.state_dict()["state"]
    if not writes:
        return
    tensors = state.tensors()
    for index, moments in optimizer_state.items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
    tensors |= {f"window.{name}": getattr(state.window, name) for name in WINDOW_TENSORS}
    window = {name: value for name, value in vars(state.window).items() if name not in WINDOW_TENSORS}
    metadata = {"counters": asdict(state.counters), "window": window, "identity": identity}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically({path: lambda file: save_file(tensors, file, metadata={"state": json.dumps(metadata)})})


def load_state(path: Path, state: TrainState, identity: dict[str, Any]) -> None:
    """Continue `state` from a checkpoint. Raises ValueError if it is damaged, or of a run with another identity."""
    tensors, metadata = _read(path)
    if differences := identity_differences(metadata["identity"], identity):
        raise ValueError(
            f"{path.parent.parent}: got settings that differ from the run begun there ({'; '.join(differences)}), "
            f"expected the same; set them back to continue, or delete {path.parent} or set another train.output_dir "
            "to start over"
        )
    state.load_tensors(tensors)
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, moment = name.split(".")
            moments.setdefault(int(index), {})[moment] = tensor
    state.optimizer.load_state_dict(state.optimizer.state_dict() | {"state": moments})
    state.counters = Counters(**metadata["counters"])
    device, saved = state.window.sums.device, _part(tensors, "window.")
    state.window = Window(saved["sums"].to(device), saved["base_sums"].to(device), **metadata["window"])


def identity_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`name was X, now Y` for each that differs."""
    names = sorted(before.keys() | now.keys())
    return [f"{n} was {before.get(n)!r}, now {now.get(n)!r}" for n in names if before.get(n) != now.get(n)]


def flat_settings(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{section: {key: value}} -> {"section.key": value} of all settings that a continuation must share."""
    settings = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    return {name: value for name, value in settings.items() if name not in FREE_SETTINGS}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = json.loads((file.metadata() or {}).get("state", "{}"))
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(_damaged(path, str(error))) from error
    if metadata.keys() != {"counters", "window", "identity"} or "window.sums" not in tensors:
        raise ValueError(_damaged(path, "parts are missing"))
    if metadata["counters"].keys() != {f.name for f in fields(Counters)}:
        raise ValueError(_damaged(path, "another release's counters"))
    return tensors, metadata


def _damaged(path: Path, reason: str) -> str:
    return f"{path}: got a file that is no complete checkpoint ({reason}); delete it to start over"
