"""One global batch through the heads, this process's share of it, with or without gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batching import Batch, Example, collate, shard
from .config import TrainConfig
from .distributed import Processes
from .features import HiddenSource
from .labels import gather_labels
from .loss import NUM_SUMS, HeadScores, LossSettings, accumulate_gradients, head_weights
from .metrics import MetricsFile
from .objectives import OBJECTIVES
from .schedule import StepPlan
from .state import TrainState
from .targets import Teacher, teacher_rows


@dataclass
class Run:
    """Everything the loop works with. `teacher`: None where the data's tokens are the targets. `examples`: all,
    held-out ones included. `report(progress 0..1, status)`."""

    config: TrainConfig
    processes: Processes
    state: TrainState
    source: HiddenSource
    teacher: Teacher | None
    examples: list[Example]
    held_out: list[int]
    plan: StepPlan
    base_to_draft: Tensor
    checkpoint: Path
    identity: dict[str, Any]
    metrics: MetricsFile | None
    report: Callable[[float, str], None]


@dataclass(frozen=True)
class Forward:
    """`batch`: this process's examples collated, None where it has none; `indices`: which they are."""

    scores: HeadScores
    batch: Batch | None
    indices: list[int]


def forward(run: Run, indices: list[int]) -> Forward:
    """This process's share of a global batch; gradients unless no_grad."""
    config, processes, heads = run.config, run.processes, run.state.heads
    num_heads = config.heads.num_heads
    own = shard(indices, processes.rank, processes.world_size)
    if not own:
        run.source.idle()
        return Forward(HeadScores(zero_sums(run), torch.empty(0, num_heads, dtype=torch.int64)), None, [])
    batch = collate([run.examples[i] for i in own]).to(processes.device)
    labels = gather_labels(batch.input_ids, batch.loss_mask, num_heads, run.base_to_draft)
    hidden, loss = run.source.hidden(own, batch), config.loss
    settings = LossSettings(
        head_weights(num_heads, loss.head_decay),
        loss.chunk_size,
        OBJECTIVES[loss.objective],
        getattr(torch, config.model.dtype),
    )
    teacher = None
    if run.teacher:
        teacher = run.teacher.targets(hidden, loss.chunk_size), teacher_rows(batch.loss_mask, num_heads)
    return Forward(accumulate_gradients(heads, hidden, labels, settings, teacher), batch, own)


def zero_sums(run: Run) -> Tensor:
    return torch.zeros(run.config.heads.num_heads, NUM_SUMS, dtype=torch.float64, device=run.processes.device)
