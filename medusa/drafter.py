"""Drafters: whatever fills a tree with tokens. The verifier does not know which one did.

`Drafter` is the seam that every design plugs into; `RootDrafter` drafts nothing (plain autoregressive decoding),
`HeadsDrafter` fills the tree from Medusa heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .tree import DraftTree

if TYPE_CHECKING:
    from .heads import MedusaHeads


class Drafter(Protocol):
    @property
    def tree(self) -> DraftTree: ...

    def propose(self, root: Tensor, hidden: Tensor) -> Tensor:
        """root int64 [B], the base's next token; hidden [B, D], the state it was predicted from.

        Returns the draft tokens, int64 [B, N], node 0 being the root.
        """
        ...


class RootDrafter:
    """Nothing is drafted: one token a step."""

    tree = DraftTree.root_only()

    def propose(self, root: Tensor, hidden: Tensor) -> Tensor:
        return root[:, None]


class HeadsDrafter:
    """Node (r0, .., rd) holds head d's guess of rank rd; heads run once a row, on the last accepted position only.

    Raises ValueError for a tree deeper than the heads or wider than their vocabulary.
    """

    def __init__(self, heads: MedusaHeads, tree: DraftTree) -> None:
        config = heads.config
        DraftTree.from_paths(tree.node_paths, max_depth=config.num_heads)
        if tree.max_width > config.num_draft_tokens:
            raise ValueError(
                f"draft tree: rank {tree.max_width - 1} is asked for, but the heads guess among "
                f"{config.num_draft_tokens} tokens; use a narrower tree"
            )
        self.heads, self.tree = heads, tree
        self._head, self._rank = tree.depth[1:] - 1, tree.rank[1:]

    @torch.no_grad()
    def propose(self, root: Tensor, hidden: Tensor) -> Tensor:
        if self.tree.num_nodes == 1:
            return root[:, None]
        logits = self.heads(hidden)[: self.tree.max_depth]  # [K, B, draft vocabulary]
        best = self.heads.draft_to_base(logits.topk(self.tree.max_width, dim=-1).indices)
        head, rank = self._head.to(root.device), self._rank.to(root.device)
        return torch.cat([root[:, None], best[head, :, rank].T], dim=1)
