"""Several conversations in one row, so that a forward of the base computes little padding.

Only the base's forward is packed: its hidden states are laid back to where the padded batch has them, so labels,
teacher rows and metrics are those of the padded batch, and none of them can look across a conversation's end. A batch
stays `optim.batch_size` conversations; packing decides in how many rows they pass through the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .batching import Batch


@dataclass(frozen=True)
class PackedRows:
    """R rows of W tokens. input_ids: int64 [R, W]. documents: int64 [R, W], which example of the batch a token belongs
    to, -1 for padding. places: int64 [B, T], where each token of the batch is among the R x W; 0 for padding."""

    input_ids: Tensor
    documents: Tensor
    places: Tensor


def pack(batch: Batch, row_length: int) -> PackedRows:
    """A padded batch in rows of at most `row_length` tokens, more only where one example alone is longer."""
    lengths = batch.attention_mask.sum(dim=1).tolist()
    rows = assign_rows(lengths, row_length)
    width = max((sum(lengths[i] for i in row) for row in rows), default=0)
    device = batch.input_ids.device
    input_ids = torch.zeros((len(rows), width), dtype=torch.int64, device=device)
    documents = torch.full((len(rows), width), -1, dtype=torch.int64, device=device)
    places = torch.zeros_like(batch.input_ids)
    for number, row in enumerate(rows):
        start = 0
        for example in row:
            end = start + lengths[example]
            input_ids[number, start:end] = batch.input_ids[example, : lengths[example]]
            documents[number, start:end] = example
            places[example, : lengths[example]] = torch.arange(start, end, device=device) + number * width
            start = end
    return PackedRows(input_ids, documents, places)


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Which examples share a row: the longest first, each into the first row with room (first-fit decreasing)."""
    rows: list[list[int]] = []
    free: list[int] = []
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        number = next((number for number, room in enumerate(free) if lengths[example] <= room), len(rows))
        if number == len(rows):
            rows.append([])
            free.append(max(row_length, lengths[example]))
        rows[number].append(example)
        free[number] -= lengths[example]
    return rows
