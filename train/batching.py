"""Examples into batches: padding, the order of an epoch, its split over processes, and the held-out share.

Everything here is a pure function of its arguments (seed and epoch included), so resuming needs no saved state and
every process works out the same order on its own. Nothing here reads files, tokenises or talks to other processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BATCHES_PER_BUCKET = 50  # examples of similar length are looked for among this many batches' worth of shuffled ones


@dataclass(frozen=True)
class Example:
    """One conversation, tokenised. input_ids: int64 [T]. loss_mask: bool [T], True on tokens the assistant wrote."""

    input_ids: Tensor
    loss_mask: Tensor
    category: str | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right to the longest of them.

    input_ids: int64 [B, T]. loss_mask: bool [B, T], False on padding. attention_mask: bool [B, T], made from the
    examples' lengths and never from a padding id, because that id is often a real end-of-turn token too.
    """

    input_ids: Tensor
    loss_mask: Tensor
    attention_mask: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.input_ids.to(device), self.loss_mask.to(device), self.attention_mask.to(device))


def collate(examples: Sequence[Example], pad_id: int = 0) -> Batch:
    """[T_i] each -> [B, max T_i]. `pad_id` may be any valid token id: nothing reads it. No examples give [0, 0]."""
    lengths = torch.tensor([len(example) for example in examples], dtype=torch.int64)
    width = int(lengths.max()) if len(examples) else 0
    input_ids = torch.full((len(examples), width), pad_id, dtype=torch.int64)
    loss_mask = torch.zeros((len(examples), width), dtype=torch.bool)
    for row, example in enumerate(examples):
        input_ids[row, : len(example)] = example.input_ids
        loss_mask[row, : len(example)] = example.loss_mask
    return Batch(input_ids, loss_mask, torch.arange(width)[None, :] < lengths[:, None])


def batch_order(
    num_examples: int, lengths: Sequence[int] | np.ndarray | None, batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """The global batches of one epoch, as indices of examples; each example is in exactly one.

    `lengths` (tokens of each example) groups examples of similar length to save padding; None shuffles plainly.
    `batch_size` is global: the batch of one process times the number of processes. The last batch may be smaller.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected at least 1 example; set optim.batch_size higher")
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(num_examples)
    if lengths is None:
        return _chunks(order, batch_size)
    assert len(lengths) == num_examples
    length_of = np.asarray(lengths)
    full: list[list[int]] = []
    partial: list[list[int]] = []
    for bucket in _chunks(order, batch_size * BATCHES_PER_BUCKET):
        # A stable sort of shuffled examples: those of equal length still change neighbours from epoch to epoch.
        by_length = np.asarray(bucket)[np.argsort(-length_of[bucket], kind="stable")]
        for batch in _chunks(by_length, batch_size):
            (full if len(batch) == batch_size else partial).append(batch)
    return [full[i] for i in random.permutation(len(full))] + partial


def _chunks(order: np.ndarray, size: int) -> list[list[int]]:
    return [order[start : start + size].tolist() for start in range(0, len(order), size)]


def shard(batch_indices: Sequence[int], rank: int, world_size: int) -> list[int]:
    """The slice of a global batch that process `rank` of `world_size` works on; slices differ by at most one example.

    Together the slices are the batch, in order, so b examples on each of 2 processes are the same batch as 2b on one.
    Empty for some ranks where the batch has fewer examples than there are processes.
    """
    assert 0 <= rank < world_size
    size = len(batch_indices)
    return list(batch_indices[size * rank // world_size : size * (rank + 1) // world_size])


def split_holdout(num_examples: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """(indices to train on, indices held out), both ascending.

    Each index is decided on its own by a hash, so growing the data moves no example from one side to the other.
    A fraction above 0 holds out at least one example and leaves at least one, where there are two or more.
    """
    if not 0 <= fraction < 1:
        raise ValueError(
            f"holdout fraction is {fraction}, expected 0 (none) up to but not including 1; set data.holdout_fraction"
        )
    scores = [_unit_hash(f"{seed}:{index}") for index in range(num_examples)]
    held = {index for index, score in enumerate(scores) if score < fraction}
    if fraction > 0 and num_examples > 1:
        lowest, highest = (pick(range(num_examples), key=scores.__getitem__) for pick in (min, max))
        held = (held | {lowest}) - {highest}
    return [i for i in range(num_examples) if i not in held], sorted(held)


def _unit_hash(text: str) -> float:
    """Evenly spread over [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
