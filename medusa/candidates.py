"""Nodes that a step could draft, each with its chance of being accepted, likeliest first.

All drafters speak in these units, so that the guesses of heads and of lookup compete for the same nodes, and so that
any number of them can be cut off the front: no node is likelier than its parent, so the first N are always a tree, and
the one of N nodes with the highest expected length.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .draft import NO_TOKEN, Draft
from .drafter import Drafter


@dataclass(frozen=True)
class Candidates:
    """tokens, parent: int64 [B, N], as in `Draft`. probability: float32 [B, N], the chance that a node and all its
    ancestors are accepted: 1 for the root, falling along each row, 0 where a row with fewer nodes is filled up."""

    tokens: Tensor
    parent: Tensor
    probability: Tensor

    @classmethod
    def of_roots(cls, root: Tensor) -> Candidates:
        """Nothing to draft. root: int64 [B]."""
        tokens = root[:, None]
        probability = torch.ones(tokens.shape, dtype=torch.float32, device=root.device)
        return cls(tokens, torch.full_like(tokens, -1), probability)

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[1])

    def cut(self, num_nodes: int) -> Candidates:
        """The best `num_nodes` of each row, root included."""
        return Candidates(self.tokens[:, :num_nodes], self.parent[:, :num_nodes], self.probability[:, :num_nodes])

    def draft(self) -> Draft:
        """All of them as one draft, as narrow as its fullest row."""
        filled = self.cut(int((self.tokens != NO_TOKEN).sum(dim=1).max()))
        if filled.num_nodes == 1:
            return Draft.of_roots(self.tokens[:, 0])
        return Draft.of_parents(filled.tokens, filled.parent)


def by_probability(tokens: Tensor, parent: Tensor, probability: Tensor, limit: int) -> tuple[Candidates, Tensor]:
    """The `limit` likeliest of any nodes, as `Candidates` and as their indices before, int64 [B, limit].

    No node may be likelier than its parent, which must stand before it where they are equally likely.
    """
    order = probability.argsort(dim=1, descending=True, stable=True)[:, :limit]
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    moved = torch.zeros_like(tokens).scatter_(1, order, places)  # those cut off are nobody's parent
    kept = parent.gather(1, order)
    new_parent = moved.gather(1, kept.clamp(min=0)).masked_fill(kept < 0, -1)
    return Candidates(tokens.gather(1, order), new_parent, probability.gather(1, order)), order


class CandidateDrafter(Drafter):
    """A drafter that says how likely its nodes are. By itself it drafts them all, `max_nodes` at most."""

    @abstractmethod
    def candidates(self, root: Tensor, hidden: Tensor) -> Candidates:
        """At most `max_nodes` for each row; arguments as for `propose`."""

    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        return self.candidates(root, hidden).draft()
