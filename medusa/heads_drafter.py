"""Draft trees out of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from .draft import Draft
from .drafter import Drafter
from .heads import Heads
from .tree import DraftTree


class StaticTreeDrafter(Drafter):
    """Node (r0, .., rd) holds head d's guess of rank rd; heads run once a row, on the last accepted position only.

    Raises ValueError for a tree deeper than the heads or wider than their vocabulary.
    """

    def __init__(self, heads: Heads, tree: DraftTree) -> None:
        config = heads.config
        DraftTree.from_paths(tree.node_paths, max_depth=config.num_heads)
        if tree.max_width > config.num_draft_tokens:
            raise ValueError(
                f"draft tree: rank {tree.max_width - 1} is asked for, but the heads guess among "
                f"{config.num_draft_tokens} tokens; use a narrower tree"
            )
        self.heads, self.tree, self.max_nodes = heads, tree, tree.num_nodes

    @torch.no_grad()
    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        if self.tree.num_nodes == 1:
            return Draft.of_roots(root)
        tree, hidden = self.tree, self.heads.fuse(hidden)
        tokens = root.new_zeros(len(root), tree.num_nodes)
        tokens[:, 0] = root
        for head in range(tree.max_depth):
            children = (tree.depth == head + 1).nonzero().flatten()
            parents, place = tree.parent[children].unique(return_inverse=True)
            ancestors = torch.stack([tree.attention_mask[p].nonzero().flatten() for p in parents])  # [n, head + 1]
            prefix = tokens[:, ancestors].flatten(0, 1)
            states = hidden[:, None].expand(-1, len(parents), -1).flatten(0, 1)
            best = self.heads.logits(head, states, prefix).topk(int(tree.rank[children].max()) + 1).indices
            best = self.heads.draft_to_base(best).view(len(root), len(parents), -1)
            tokens[:, children] = best[:, place, tree.rank[children]]
        return Draft.of_tree(tree, tokens)
