"""A draft: the tokens that one verify step checks, for each row a tree of its own.

`DraftTree` is a shape that is chosen beforehand; a `Draft` is what a drafter hands to the verifier in one step, where
every row may have another shape. Rows with fewer nodes than the largest are filled up with `NO_TOKEN`, which no base
ever chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .tree import DraftTree

NO_TOKEN = -1


@dataclass(frozen=True)
class Draft:
    """tokens: int64 [B, N], node 0 the root. parent: int64 [B, N], -1 for the root; parents stand before their
    children. depth: int64 [B, N], 0 for the root. mask: bool [B, N, N], which nodes each one sees: itself and its
    ancestors. All on one device."""

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    mask: Tensor

    @classmethod
    def of_tree(cls, tree: DraftTree, tokens: Tensor) -> Draft:
        """The same tree in every row. tokens: int64 [B, N]."""
        batch, device = tokens.shape[0], tokens.device
        parent, depth = (index.to(device).expand(batch, -1) for index in (tree.parent, tree.depth))
        return cls(tokens, parent, depth, tree.attention_mask.to(device).expand(batch, -1, -1))

    @classmethod
    def of_roots(cls, root: Tensor) -> Draft:
        """Nothing drafted. root: int64 [B]."""
        return cls.of_tree(DraftTree.root_only(), root[:, None])

    @classmethod
    def of_parents(cls, tokens: Tensor, parent: Tensor) -> Draft:
        """tokens and parent: int64 [B, N], as above; depth and mask follow from them."""
        batch, num_nodes = tokens.shape
        mask = torch.eye(num_nodes, dtype=torch.bool, device=tokens.device).repeat(batch, 1, 1)
        parent_or_root = parent.clamp(min=0)
        ancestor = parent_or_root
        while True:  # all nodes go up together, the root staying where it is
            mask.scatter_(2, ancestor[..., None], True)
            if not bool(ancestor.any()):
                return cls(tokens, parent, mask.sum(dim=-1) - 1, mask)
            ancestor = parent_or_root.gather(1, ancestor)

    def without(self, rows: Sequence[int]) -> Draft:
        """Nothing drafted for these rows."""
        tokens = self.tokens.clone()
        tokens[list(rows), 1:] = NO_TOKEN
        return replace(self, tokens=tokens)

    @property
    def num_nodes(self) -> int:
        """N, the root and what fills up included."""
        return int(self.tokens.shape[1])

    @property
    def input_ids(self) -> Tensor:
        """int64 [B, N]: tokens that a model can look up, some id in place of NO_TOKEN."""
        return self.tokens.clamp(min=0)

    @property
    def num_drafted(self) -> Tensor:
        """int64 [B]: nodes of each row that hold a guess."""
        return (self.tokens != NO_TOKEN).sum(dim=1) - 1
