"""One global batch through the heads, this process's share of it, with or without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batching import Batch, Example, collate, shard
from .config import TrainConfig
from .distributed import Processes
from .features import HiddenSource
from .joint import Joint
from .labels import gather_labels, gather_prefix
from .loss import NUM_SUMS, HeadScores, LossSettings, accumulate_gradients, head_weights
from .metrics import MetricsFile
from .objectives import OBJECTIVES
from .schedule import StepPlan
from .state import TrainState
from .targets import Teacher, teacher_rows
from .throughput import Throughput


@dataclass
class Run:
    """Everything the loop works with. `teacher`: None where the data's tokens are the targets. `joint`: None where the
    base stays as it is. `examples`: all, held-out ones included. `report(progress 0..1, status)`."""

    config: TrainConfig
    processes: Processes
    state: TrainState
    source: HiddenSource
    teacher: Teacher | None
    joint: Joint | None
    examples: Sequence[Example]
    held_out: list[int]
    plan: StepPlan
    base_to_draft: Tensor
    checkpoint: Path
    identity: dict[str, Any]
    metrics: MetricsFile | None
    throughput: Throughput
    report: Callable[[float, str], None]


@dataclass(frozen=True)
class Forward:
    """`batch`: this process's examples collated, None where it has none; `indices`: which they are. `base_sums`:
    float64 [2], the base's own loss and its labels, zeros in Medusa-1."""

    scores: HeadScores
    base_sums: Tensor
    batch: Batch | None
    indices: list[int]


def forward(run: Run, indices: list[int], ramp: float = 0.0) -> Forward:
    """This process's share of a global batch; gradients unless no_grad. `ramp`: see joint.py; 0 leaves the base out."""
    config, processes, heads = run.config, run.processes, run.state.heads
    num_heads = config.heads.num_heads
    own = shard(indices, processes.rank, processes.world_size)
    if not own:
        run.source.idle()
        nothing = HeadScores(zero_sums(run), torch.empty(0, num_heads, dtype=torch.int64))
        return Forward(nothing, zero_base_sums(run), None, [])
    batch = collate([run.examples[i] for i in own]).to(processes.device)
    labels = gather_labels(batch.input_ids, batch.loss_mask, num_heads, run.base_to_draft)
    prefix = gather_prefix(batch.input_ids, batch.loss_mask, num_heads)
    with torch.set_grad_enabled(torch.is_grad_enabled() and ramp > 0):
        states, loss = run.source.hidden(own, batch), config.loss
    hidden = states.detach().requires_grad_(states.requires_grad)
    settings = LossSettings(
        head_weights(num_heads, loss.head_decay),
        loss.chunk_size,
        OBJECTIVES[loss.objective],
        getattr(torch, config.model.dtype),
    )
    teacher = None
    if run.teacher:
        teacher = run.teacher.targets(hidden, loss.chunk_size), teacher_rows(batch.loss_mask, num_heads)
    scores, base_sums = accumulate_gradients(heads, hidden, prefix, labels, settings, teacher), zero_base_sums(run)
    if run.joint and (hidden.requires_grad or not torch.is_grad_enabled()):
        # Times the number of heads, because all is divided by the number of all heads' labels in the end.
        if hidden.grad is not None:
            hidden.grad *= ramp * run.joint.settings.heads_weight * num_heads
        base_sums = run.joint.base_loss(hidden, batch, float(num_heads))
        if hidden.grad is not None:
            states.backward(hidden.grad)
    return Forward(scores, base_sums, batch, own)


def zero_sums(run: Run) -> Tensor:
    return torch.zeros(run.config.heads.num_heads, NUM_SUMS, dtype=torch.float64, device=run.processes.device)


def zero_base_sums(run: Run) -> Tensor:
    return torch.zeros(2, dtype=torch.float64, device=run.processes.device)
