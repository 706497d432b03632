"""What the heads are trained towards: the data's own tokens, or the base's distribution over the next token.

The base's distribution costs nothing new: its hidden states are the heads' input, and the state at t + k + 1 says what
the base expects at t + k + 2, which is what head k guesses at t. Only its `num_tokens` most likely tokens are kept, so
that a target is a short list whatever the vocabulary, and the K heads share one list per position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .labels import IGNORE_INDEX, label_positions


@dataclass(frozen=True)
class Targets:
    """Distributions over draft indices. ids: int64 [n, M]. probs: float32 [n, M], each row sums to 1."""

    ids: Tensor
    probs: Tensor

    @classmethod
    def one_hot(cls, labels: Tensor) -> Targets:
        """labels: int64 [n], draft indices."""
        return cls(labels[:, None], torch.ones(len(labels), 1, device=labels.device))

    def __getitem__(self, rows: Tensor) -> Targets:
        return Targets(self.ids[rows], self.probs[rows])


@dataclass(frozen=True)
class Teacher:
    """The frozen base as a teacher. weight: [num_draft_tokens, D], its lm_head's draft rows; bias: theirs, or None.
    finish: what the family does to its logits after the projection. num_tokens: M, see `Targets`."""

    weight: Tensor
    bias: Tensor | None
    finish: Callable[[Tensor], Tensor]
    num_tokens: int

    @torch.no_grad()
    def targets(self, hidden: Tensor, chunk_size: int) -> Targets:
        """states [n, D or more] -> what the base expects after each, cut to its M likeliest, summing to 1."""
        size = min(self.num_tokens, len(self.weight))
        values, ids = hidden.new_empty(len(hidden), size), hidden.new_empty(len(hidden), size, dtype=torch.int64)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            last = hidden[rows, : self.weight.shape[1]].to(self.weight.dtype)
            logits = torch.nn.functional.linear(last, self.weight, self.bias)
            values[rows], ids[rows] = self.finish(logits).topk(size, dim=-1, sorted=False)
        return Targets(ids, values.float().softmax(dim=-1))


def teacher_rows(loss_mask: Tensor, num_heads: int) -> Tensor:
    """int64 [n, K]: for each row of `label_positions`, which of these rows is the state at t + k + 1, head k's teacher;
    IGNORE_INDEX where the token at t + k + 2 is not under loss. loss_mask: bool [B, T]."""
    reached = label_positions(loss_mask, num_heads)
    numbers = (reached.flatten().cumsum(0) - 1).view_as(reached)
    rows = torch.full((*loss_mask.shape, num_heads), IGNORE_INDEX, dtype=torch.int64, device=loss_mask.device)
    for k in range(num_heads):
        rows[:, : -(k + 2), k] = numbers[:, k + 1 : -1].where(loss_mask[:, k + 2 :], IGNORE_INDEX)
    return rows[reached]
