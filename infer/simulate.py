"""Dynamic trees on held-out text, without decoding it: what a step at each position would have drafted and kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa.base_model import BaseModel
from medusa.candidates import CandidateDrafter
from medusa.dynamic_statistics import DynamicStatistics

from .evaluate import LabelledText, full_positions

MAX_POSITIONS = 1024
ROWS = 32


@torch.inference_mode()
def simulate(
    base_model: BaseModel,
    drafter: CandidateDrafter,
    num_heads: int,
    texts: Sequence[LabelledText],
    statistics: DynamicStatistics,
) -> None:
    """Counts the positions that `evaluate` counts, `MAX_POSITIONS` at most, spread evenly over the texts.

    drafter: one that remembers nothing of its rows, drafting `num_heads` deep at most.
    """
    found = [full_positions(text.loss_mask, num_heads) for text in texts]
    stride = max(1, -(-sum(map(len, found)) // MAX_POSITIONS))
    for text, positions in zip(texts, found, strict=True):
        ids = text.input_ids.to(base_model.device)
        chosen = positions[::stride].to(ids.device)
        if not len(chosen):
            continue
        hidden = base_model.hidden_states(ids[None], torch.ones_like(ids[None]))[0]
        for rows in chosen.split(ROWS):
            truth = ids[rows[:, None] + 2 + torch.arange(num_heads, device=ids.device)]
            statistics.update(drafter.candidates(ids[rows + 1], hidden[rows]), truth)
