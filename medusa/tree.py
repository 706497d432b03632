"""Draft trees: which continuations one verify step checks at once.

A `DraftTree` is a shape only. Node 0 is the root, the token that the base model has already chosen; every other node
is named by the path of ranks that leads to it: path (0, 2) is the third best guess of head 1 below the best guess of
head 0. Nodes are ordered by depth, so that a parent always stands before its children and a chain is `0..depth`.
Shapes: N nodes (root included), P root-to-leaf paths, L = max depth + 1 nodes on the longest path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

Path = tuple[int, ...]


@dataclass(frozen=True)
class DraftTree:
    """A prefix-closed set of rank paths, root excluded, sorted by depth and then by ranks.

    Build one with `from_paths`, `chain`, `root_only` or `cartesian`; these validate, the bare constructor does not.
    """

    node_paths: tuple[Path, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], *, max_depth: int | None = None) -> DraftTree:
        """Tree of the given rank paths (Medusa's `medusa_choices` lists fit as they are).

        Raises ValueError naming the offending path: empty, repeated, negative rank, its prefix missing, or deeper
        than `max_depth` (the number of heads).
        """
        nodes = [tuple(int(rank) for rank in path) for path in paths]
        known = set(nodes)
        if len(known) != len(nodes):
            repeated = next(path for path in nodes if nodes.count(path) > 1)
            raise ValueError(f"draft tree: path {list(repeated)} is given twice; every node must be listed once")
        for path in nodes:
            if not path:
                raise ValueError("draft tree: an empty path is the root, which is always there; leave it out")
            if min(path) < 0:
                raise ValueError(f"draft tree: path {list(path)} has a negative rank; ranks count from 0")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"draft tree: path {list(path)} needs its prefix {list(path[:-1])}, which is missing")
            if max_depth is not None and len(path) > max_depth:
                raise ValueError(
                    f"draft tree: path {list(path)} has depth {len(path)}, but there are {max_depth} heads; "
                    "shorten the path or train more heads"
                )
        return cls(tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @classmethod
    def root_only(cls) -> DraftTree:
        """The tree of plain autoregressive decoding: nothing is drafted."""
        return cls(())

    @classmethod
    def chain(cls, depth: int) -> DraftTree:
        """Each head's best guess, one below the other."""
        return cls(tuple((0,) * d for d in range(1, depth + 1)))

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> DraftTree:
        """All combinations of the `widths[d]` best guesses of head d (Medusa, section 2.1.2)."""
        levels = (product(*(range(width) for width in widths[: d + 1])) for d in range(len(widths)))
        return cls.from_paths(path for level in levels for path in level)

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return len(self.node_paths) + 1

    @property
    def max_depth(self) -> int:
        return len(self.node_paths[-1]) if self.node_paths else 0

    @cached_property
    def max_width(self) -> int:
        """How many guesses of one head are needed: 1 + the highest rank, 0 for the root-only tree."""
        return max((max(path) + 1 for path in self.node_paths), default=0)

    @cached_property
    def parent(self) -> Tensor:
        """int64 [N]: index of each node's parent; the root's is -1."""
        index = {path: i for i, path in enumerate(((), *self.node_paths))}
        return torch.tensor([-1, *(index[path[:-1]] for path in self.node_paths)])

    @cached_property
    def depth(self) -> Tensor:
        """int64 [N]: 0 for the root. A node's position is the length of the context plus its depth."""
        return torch.tensor([0, *(len(path) for path in self.node_paths)])

    @cached_property
    def rank(self) -> Tensor:
        """int64 [N]: which guess of the head `depth - 1` the node holds; 0 for the root."""
        return torch.tensor([0, *(path[-1] for path in self.node_paths)])

    @cached_property
    def attention_mask(self) -> Tensor:
        """bool [N, N]: True where the row's node sees the column's: itself and its ancestors."""
        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node in range(1, self.num_nodes):
            mask[node] |= mask[self.parent[node]]
        return mask

    @cached_property
    def paths(self) -> Tensor:
        """int64 [P, L]: node indices from the root to each leaf, padded with -1."""
        is_parent = set(self.parent.tolist())
        leaves = [node for node in range(self.num_nodes) if node not in is_parent]
        paths = torch.full((len(leaves), self.max_depth + 1), -1)
        for row, leaf in enumerate(leaves):
            chain = self.attention_mask[leaf].nonzero().flatten()
            paths[row, : len(chain)] = chain
        return paths

    def to_list(self) -> list[list[int]]:
        """The paths as JSON-ready lists; `from_paths` reads them back."""
        return [list(path) for path in self.node_paths]
