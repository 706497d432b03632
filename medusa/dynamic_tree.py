"""Draft trees grown anew in each step: the nodes that are likeliest here and now, for a given number of nodes.

A node's chance is the product of its heads' probabilities down the path, so no node is likelier than its parent. Hence
the best tree is found level by level: after each, only the best so far are kept, and only nodes among them are grown
further. What is dropped, and all that could have grown below it, is less likely than as many nodes that stay. This is
the optimum of OPT-Tree (Wang et al., 2024) and EAGLE-2 (Li et al., 2024), without their limits on width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .candidates import Candidates, by_probability
from .draft import NO_TOKEN
from .heads import Heads
from .heads_drafter import HeadGuesses, HeadsDrafter


class DynamicTreeDrafter(HeadsDrafter):
    """The `max_nodes` likeliest nodes (root included) of each row.

    temperatures: by which each head's logits are divided so that its probabilities can be multiplied; 1 if not given.
    smallest_chance: by number of rows; below nodes less likely than that no head is asked, which saves heads that look
    at the prefix most of their work where so unlikely nodes do not pay anyway; 0, the exact optimum, asks everywhere.
    Raises ValueError for another number of them than heads, or for `max_nodes` below 1.
    """

    def __init__(
        self,
        heads: Heads,
        max_nodes: int,
        temperatures: Sequence[float] | None = None,
        *,
        smallest_chance: Callable[[int], float] = lambda num_rows: 0.0,
    ) -> None:
        super().__init__(heads)
        num_heads = heads.config.num_heads
        self.temperatures = list(temperatures or [1.0] * num_heads)
        if max_nodes < 1:
            raise ValueError(f"dynamic tree: max_nodes is {max_nodes}, expected at least 1 (the root)")
        if len(self.temperatures) != num_heads or not all(value > 0 for value in self.temperatures):
            raise ValueError(
                f"dynamic tree: got temperatures {self.temperatures}, expected {num_heads} positive ones, one a head; "
                "run `medusa calibrate`"
            )
        self.max_nodes, self.smallest_chance = max_nodes, smallest_chance
        self._width = min(max_nodes - 1, heads.config.num_draft_tokens)

    @torch.no_grad()
    def candidates(self, root: Tensor, hidden: Tensor) -> Candidates:
        pool = Candidates.of_roots(root)
        if self.max_nodes == 1:
            return pool
        guesses = HeadGuesses(self.heads, self._states(hidden))
        leaves, is_leaf = torch.zeros_like(pool.tokens), torch.ones_like(pool.tokens, dtype=torch.bool)
        for head, temperature in enumerate(self.temperatures):
            logits = guesses.logits(head, _prefixes(pool, leaves, head)) / temperature
            pool, is_next = self._grow(pool, leaves, is_leaf, logits)
            num_leaves = int(is_next.sum(dim=1).max())
            if num_leaves == 0:
                break
            leaves = is_next.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :num_leaves]
            is_leaf = is_next.gather(1, leaves)
        return pool

    def _grow(self, pool: Candidates, leaves: Tensor, is_leaf: Tensor, logits: Tensor) -> tuple[Candidates, Tensor]:
        """The best of the pool and all children of its leaves, and which of them are children to grow further.

        leaves, is_leaf: int64 and bool [B, n], nodes of the pool, where the latter says so. logits [B, n or 1, V].
        """
        best, tokens = logits.topk(self._width, dim=-1)
        # A probability must not round to more than 1, or a child would be likelier than its parent.
        chance = (best - logits.logsumexp(dim=-1, keepdim=True)).exp().clamp(max=1.0)
        chance = chance * pool.probability.gather(1, leaves).masked_fill(~is_leaf, 0.0)[..., None]
        tokens = self.heads.draft_to_base(tokens).expand(chance.shape)
        tokens = tokens.masked_fill(~is_leaf[..., None], NO_TOKEN).flatten(1)
        chance, children = chance.flatten(1).topk(min(self.max_nodes - 1, tokens.shape[1]), dim=-1)
        pool_size = pool.num_nodes
        new_tokens = tokens.gather(1, children)
        new_parent = leaves.gather(1, children // self._width).masked_fill(new_tokens == NO_TOKEN, 0)
        grown, order = by_probability(
            torch.cat([pool.tokens, new_tokens], dim=1),
            torch.cat([pool.parent, new_parent], dim=1),
            torch.cat([pool.probability, chance], dim=1),
            self.max_nodes,
        )
        is_new = (order >= pool_size) & (grown.tokens != NO_TOKEN)
        return grown, is_new & (grown.probability >= self.smallest_chance(len(best)))


def _prefixes(pool: Candidates, nodes: Tensor, depth: int) -> Tensor:
    """Tokens from the root to each of the nodes, which lie `depth` deep: int64 [B, n] -> [B, n, depth + 1]."""
    columns = []
    for level in range(depth + 1):
        if level:
            nodes = pool.parent.gather(1, nodes).clamp(min=0)
        columns.append(pool.tokens.gather(1, nodes))
    # A place that only fills up (see `leaves`) may hold no token; heads must be able to look it up.
    return torch.stack(columns[::-1], dim=-1).clamp(min=0)
