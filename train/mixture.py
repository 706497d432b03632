"""Sources by weight: which conversations an epoch is made of, a pure function of seed and epoch.

A source of n conversations and weight w gives round(n x w) of them to every epoch, at least one. They are taken from
one shuffled order of the source, each epoch where the one before ended, round and round: weight 2 is each conversation
twice an epoch, weight 0.5 one half in the first epoch and the other in the second. So after any number of epochs two
conversations of a source have been seen equally often, or one of them once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .data_statistics import SourceStatistics


@dataclass(frozen=True)
class Part:
    """A source's training examples: their indices, ascending, and how many of them an epoch has."""

    indices: np.ndarray
    per_epoch: int


@dataclass(frozen=True)
class Mixture:
    parts: Sequence[Part]
    seed: int

    @property
    def num_per_epoch(self) -> int:
        return sum(part.per_epoch for part in self.parts)

    @property
    def counts(self) -> list[int] | None:
        """Examples of each source in an epoch; None where each is there once, wherever sources begin and end."""
        is_plain = all(part.per_epoch == len(part.indices) for part in self.parts)
        return None if is_plain else [part.per_epoch for part in self.parts]

    def epoch(self, epoch: int) -> np.ndarray:
        """int64 [num_per_epoch]: indices of examples, ascending within each source; not yet shuffled."""
        return np.concatenate([self._of_part(number, epoch) for number in range(len(self.parts))])

    def _of_part(self, number: int, epoch: int) -> np.ndarray:
        part = self.parts[number]
        size = len(part.indices)
        order = np.random.default_rng((self.seed, number, size)).permutation(size)
        places = np.arange(epoch * part.per_epoch, (epoch + 1) * part.per_epoch) % size
        return np.sort(part.indices[order[places]])


def mix(training: Sequence[int], sources: Sequence[SourceStatistics], seed: int) -> Mixture:
    """`training`: indices of examples, ascending; those of the first source come first in the data."""
    indices = np.asarray(training, dtype=np.int64)
    ends = np.cumsum([source.conversations for source in sources])
    parts = []
    for source, own in zip(sources, np.split(indices, np.searchsorted(indices, ends[:-1])), strict=True):
        if len(own):
            parts.append(Part(own, max(1, round(len(own) * source.weight))))
    return Mixture(parts, seed)
