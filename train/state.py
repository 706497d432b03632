"""What a training run is at a step boundary, and its checkpoint: one safetensors file, replaced atomically.

Batches and learning rates are pure functions of the step, and nothing else draws random numbers, so parameters, the
optimizer's moments, the step and the counters are all there is: going on from a checkpoint is bitwise the same run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa.checkpoint import write_atomically
from medusa.heads import MedusaHeads

from .optimizer import RunOptimizer

# Settings that may change between a run and its continuation without changing the heads that come out.
FREE_SETTINGS = {
    "train.output_dir",
    "train.log_every",
    "train.save_every",
    "train.cache_hidden_states",
    "train.keep_hidden_states",
    "data.on_bad_record",
    "optim.batch_size",  # a batch of all processes is part of the identity instead
    "data.path",
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
    """What happened since the last line of metrics. `sums`: float64 [K, NUM_SUMS]. `loss`: sum over steps."""

    sums: Tensor
    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class TrainState:
    heads: MedusaHeads
    optimizer: RunOptimizer
    counters: Counters = field(default_factory=Counters)
    window: Window = field(default_factory=lambda: Window(torch.zeros(0, 5)))


def save_state(path: Path, state: TrainState, identity: dict[str, Any], writes: bool = True) -> None:
    """`identity`: settings and fingerprints that a continuation must share (flat, JSON). All processes call it, for
    the optimizer's state may have to be gathered; one of them writes."""
    optimizer_state = state.optimizer.state_dict()["state"]
    if not writes:
        return
    tensors = {f"heads.{name}": tensor for name, tensor in state.heads.state_dict().items()}
    for index, moments in optimizer_state.items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
    tensors["window.sums"] = state.window.sums
    window = {name: value for name, value in vars(state.window).items() if name != "sums"}
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
    own = {name: t for name, t in tensors.items() if name.startswith("heads.")}
    state.heads.load_state_dict({name.removeprefix("heads."): tensor for name, tensor in own.items()}, strict=True)
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, moment = name.split(".")
            moments.setdefault(int(index), {})[moment] = tensor
    state.optimizer.load_state_dict(state.optimizer.state_dict() | {"state": moments})
    state.counters = Counters(**metadata["counters"])
    state.window = Window(tensors["window.sums"].to(state.window.sums.device), **metadata["window"])


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
