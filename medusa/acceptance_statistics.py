"""How often a tree's paths come true on held-out text, and the best tree of each size under those counts.

For one position of a text, each head's true token has a rank in that head's list. The ranks of all heads together name
the one path of a draft that would have been accepted. Counted jointly, not as a product of per-head accuracies: heads
miss on the same hard tokens, so a product understates deep paths. Depth 1 is head 0; the root is the base model's own
token and is always accepted. Nothing here knows about time; see `calibration`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .tree import DraftTree, Path


def true_ranks(logits: Tensor, targets: Tensor, max_rank: int) -> Tensor:
    """Rank of each target among its logits: int64 [n] in [0, max_rank], `max_rank` meaning "not among the best".

    logits [n, V]; targets int64 [n], -1 where the true token is not in this vocabulary. Equal logits: lower id first.
    """
    assert logits.dim() == 2 and targets.shape == logits.shape[:1], (logits.shape, targets.shape)
    index = targets.clamp(min=0)[:, None]
    own = logits.gather(1, index)
    ids = torch.arange(logits.shape[1], device=logits.device)
    rank = ((logits > own) | ((logits == own) & (ids < index))).sum(1).clamp(max=max_rank)
    return rank.masked_fill(targets < 0, max_rank)


@dataclass
class AcceptanceStatistics:
    """Counts over positions of held-out text.

    `matches[path]`: positions whose true tokens have the ranks `path` in heads 0, 1, ... and then a miss (or no more
    heads). `rank_counts[k][r]`: positions where head k's true token has rank r; the last entry, `max_rank`, is a miss.
    """

    num_heads: int
    max_rank: int
    matches: Counter[Path] = field(default_factory=Counter)
    rank_counts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.max_rank < 1:
            raise ValueError(
                f"acceptance statistics: num_heads {self.num_heads} and max_rank {self.max_rank} must be at least 1"
            )
        if not self.rank_counts:
            self.rank_counts = [[0] * (self.max_rank + 1) for _ in range(self.num_heads)]

    @property
    def num_positions(self) -> int:
        return sum(self.rank_counts[0])

    def update(self, ranks: Tensor) -> None:
        """Count positions. ranks: int [n, K], head k's rank of the token at t + k + 2; `max_rank` and above: a miss."""
        if ranks.dim() != 2 or ranks.shape[1] != self.num_heads or ranks.is_floating_point():
            raise ValueError(
                f"acceptance statistics: got ranks of shape {list(ranks.shape)} and {ranks.dtype}, expected whole "
                f"numbers [positions, {self.num_heads}], a column a head"
            )
        if not len(ranks):
            return
        if ranks.min() < 0:
            raise ValueError("acceptance statistics: a rank is negative; count only positions whose labels all exist")
        ranks = ranks.clamp(max=self.max_rank).cpu()
        rows, counts = torch.unique(ranks, dim=0, return_counts=True)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            depth = row.index(self.max_rank) if self.max_rank in row else self.num_heads
            self.matches[tuple(row[:depth])] += count
            for head, rank in enumerate(row):
                self.rank_counts[head][rank] += count

    def merge(self, other: AcceptanceStatistics) -> AcceptanceStatistics:
        """Both sets of positions together, as a new object. Raises ValueError when the shapes differ."""
        if (self.num_heads, self.max_rank) != (other.num_heads, other.max_rank):
            raise ValueError(
                f"acceptance statistics: cannot merge {self.num_heads} heads x {self.max_rank} ranks with "
                f"{other.num_heads} x {other.max_rank}; measure both alike"
            )
        rank_counts = [
            [a + b for a, b in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(self.rank_counts, other.rank_counts, strict=True)
        ]
        return AcceptanceStatistics(self.num_heads, self.max_rank, self.matches + other.matches, rank_counts)

    def accuracy_by_rank(self) -> Tensor:
        """float64 [K, R]: share of positions where head k's true token has exactly rank r. Rows sum to 1 - misses."""
        counts = torch.tensor(self.rank_counts, dtype=torch.float64)[:, :-1]
        return counts / max(self.num_positions, 1)

    def path_counts(self) -> Counter[Path]:
        """Positions in which every node of the path comes true, for each path that ever did."""
        counts: Counter[Path] = Counter()
        for match, count in self.matches.items():
            for depth in range(1, len(match) + 1):
                counts[match[:depth]] += count
        return counts

    def path_probabilities(self, paths: Iterable[Path]) -> list[float]:
        counts, total = self.path_counts(), max(self.num_positions, 1)
        return [counts[path] / total for path in paths]

    def expected_length(self, tree: DraftTree) -> float:
        """tau: tokens emitted per verify step with this tree, the bonus token included; 1.0 for the root-only tree."""
        return 1.0 + sum(self.path_probabilities(tree.node_paths))

    def compact(self, max_paths: int) -> AcceptanceStatistics:
        """At most `max_paths` (1 or more) different matches: the deepest are cut at their end, rare ones first.

        A cut only shortens what was accepted, so tau of a tree can sink but never rises. `rank_counts` stay exact.
        """
        matches = Counter(self.matches)
        matches[()] += 0  # whatever is cut ends up here at last: reserve its place
        for depth in range(self.num_heads, 0, -1):
            surplus = len(matches) - max_paths
            longest = sorted((path for path in matches if len(path) == depth), key=lambda path: (matches[path], path))
            for path in longest[: max(surplus, 0)]:
                matches[path[:-1]] += matches.pop(path)
        return AcceptanceStatistics(self.num_heads, self.max_rank, matches, [list(row) for row in self.rank_counts])


def ranked_paths(statistics: AcceptanceStatistics) -> list[tuple[Path, int]]:
    """Every path that came true at least once with its count, most frequent first, a prefix always before its paths."""
    return sorted(statistics.path_counts().items(), key=lambda item: (-item[1], len(item[0]), item[0]))


def best_tree(statistics: AcceptanceStatistics, num_nodes: int) -> DraftTree:
    """The tree of at most `num_nodes` nodes (root included) with the highest tau under the counted positions.

    A node adds its path's probability to tau whatever else is in the tree, and no path is likelier than its prefix: so
    the most probable paths are prefix-closed and exactly optimal. Paths that never came true are left out, so the tree
    can be smaller than asked. Raises ValueError for `num_nodes` below 1.
    """
    if num_nodes < 1:
        raise ValueError(f"draft tree: num_nodes is {num_nodes}, expected at least 1 (the root)")
    paths = [path for path, _ in ranked_paths(statistics)[: num_nodes - 1]]
    return DraftTree.from_paths(paths, max_depth=statistics.num_heads)


def tree_family(statistics: AcceptanceStatistics, sizes: Iterable[int]) -> list[tuple[int, DraftTree, float]]:
    """(nodes asked for, best tree, its tau) for each size."""
    family = []
    for size in sizes:
        tree = best_tree(statistics, size)
        family.append((size, tree, statistics.expected_length(tree)))
    return family
