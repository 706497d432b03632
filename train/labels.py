"""Which positions the heads learn from, and the token each head is scored against there."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100  # no token there, or not one under loss
OUTSIDE_INDEX = -1  # a token under loss, but outside the draft vocabulary: no label for the loss, a miss for accuracy


def label_positions(loss_mask: Tensor, num_heads: int) -> Tensor:
    """bool [B, T]: the positions t of which one of the next K + 1 tokens is under loss and inside the row.

    Head k is scored against t + k + 2, the base itself against t + 1: a state that only the base's score needs may be
    a teacher's (see targets.py). The position may be the prompt's: the first word of an answer is guessed from there.
    """
    reached = torch.zeros_like(loss_mask)
    for ahead in range(1, num_heads + 2):
        reached[:, :-ahead] |= loss_mask[:, ahead:]
    return reached


def full_positions(loss_mask: Tensor, num_heads: int) -> Tensor:
    """bool [n]: which of the n `label_positions` have all of the next K + 1 tokens under loss, as in decoding."""
    full = torch.ones_like(loss_mask)
    for ahead in range(1, num_heads + 2):
        full[:, :-ahead] &= loss_mask[:, ahead:]
        full[:, -ahead:] = False
    return full[label_positions(loss_mask, num_heads)]


def gather_labels(input_ids: Tensor, loss_mask: Tensor, num_heads: int, base_to_draft: Tensor) -> Tensor:
    """int64 [n, K]: each head's label at the n positions of `label_positions`, row by row.

    input_ids, loss_mask: [B, T]. base_to_draft: int64 [V], see `draft_index`. Labels are draft indices, IGNORE_INDEX
    or OUTSIDE_INDEX.
    """
    targets = torch.where(loss_mask, base_to_draft[input_ids], IGNORE_INDEX)
    labels = torch.full((*input_ids.shape, num_heads), IGNORE_INDEX, dtype=torch.int64, device=input_ids.device)
    for k in range(num_heads):
        labels[:, : -(k + 2), k] = targets[:, k + 2 :]
    return labels[label_positions(loss_mask, num_heads)]


def gather_prefix(input_ids: Tensor, loss_mask: Tensor, num_heads: int) -> Tensor:
    """int32 [n, K]: the tokens at t + 1 .. t + K at the n positions of `label_positions`: those before each label, of
    which head k may look at the first k + 1. 0 beyond the row, where there are no labels either."""
    prefix = input_ids.new_zeros(*input_ids.shape, num_heads, dtype=torch.int32)
    for k in range(num_heads):
        prefix[:, : -(k + 1), k] = input_ids[:, k + 1 :]
    return prefix[label_positions(loss_mask, num_heads)]


def next_labels(input_ids: Tensor, loss_mask: Tensor, num_heads: int) -> Tensor:
    """int64 [n]: the base's own label at the n positions of `label_positions`, the token at t + 1; IGNORE_INDEX where
    that is not under loss."""
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, :-1] = input_ids[:, 1:].where(loss_mask[:, 1:], IGNORE_INDEX)
    return labels[label_positions(loss_mask, num_heads)]


def draft_index(draft_token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """int64 [V]: draft index of each base token, OUTSIDE_INDEX where it has none."""
    if draft_token_ids is None:
        return torch.arange(vocab_size)
    index = torch.full((vocab_size,), OUTSIDE_INDEX, dtype=torch.int64, device=draft_token_ids.device)
    index[draft_token_ids] = torch.arange(len(draft_token_ids), device=draft_token_ids.device)
    return index
