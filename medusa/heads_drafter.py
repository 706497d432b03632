"""Draft trees out of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from .draft import Draft
from .drafter import Drafter
from .heads import MedusaHeads
from .tree import DraftTree


class StaticTreeDrafter(Drafter):
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
        self.heads, self.tree, self.max_nodes = heads, tree, tree.num_nodes
        self._head, self._rank = tree.depth[1:] - 1, tree.rank[1:]

    @torch.no_grad()
    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        if self.tree.num_nodes == 1:
            return Draft.of_roots(root)
        logits = self.heads(hidden)[: self.tree.max_depth]  # [K, B, draft vocabulary]
        best = self.heads.draft_to_base(logits.topk(self.tree.max_width, dim=-1).indices)
        head, rank = self._head.to(root.device), self._rank.to(root.device)
        return Draft.of_tree(self.tree, torch.cat([root[:, None], best[head, :, rank].T], dim=1))
