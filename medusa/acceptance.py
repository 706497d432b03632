"""Acceptance: which drafted path the base model agrees with. One function a rule; greedy for now.

A rule reads the base's logits at every node and answers for each row: the accepted nodes from the root on (the root is
the base's own choice and always accepted), and the bonus token that the base itself chooses after the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """nodes: int64 [B, L], accepted node indices from the root, padded with 0. counts: int64 [B], how many of them
    (at least 1). bonus: int64 [B], the base's token after the last accepted node."""

    nodes: Tensor
    counts: Tensor
    bonus: Tensor

    @property
    def last(self) -> Tensor:
        """int64 [B]: the last accepted node."""
        return self.nodes.gather(1, self.counts[:, None] - 1)[:, 0]


def greedy(tree: DraftTree, draft_tokens: Tensor, choices: Tensor) -> Acceptance:
    """Accept the longest path whose every token is the base's own choice at its parent.

    draft_tokens and choices: int64 [B, N]; choices are the argmax of the base's logits at each node. Siblings hold
    different tokens, so at most one path goes on at each node and the longest one is unique up to its end.
    """
    batch = draft_tokens.shape[0]
    parent, paths = tree.parent.to(choices.device), tree.paths.to(choices.device)
    matched = draft_tokens == choices[:, parent.clamp(min=0)]
    matched[:, 0] = True
    on_path = matched[:, paths.clamp(min=0)] & (paths >= 0)  # [B, P, L]
    lengths = on_path.cumprod(dim=-1).sum(dim=-1)  # [B, P]
    counts, best = lengths.max(dim=-1)
    keep = torch.arange(paths.shape[1], device=choices.device) < counts[:, None]
    nodes = torch.where(keep, paths[best], 0)
    last = nodes.gather(1, counts[:, None] - 1)
    return Acceptance(nodes, counts, choices.gather(1, last).view(batch))


def slow_greedy(tree: DraftTree, draft_tokens: list[int], choices: list[int]) -> tuple[list[int], int]:
    """The obvious reference for one row: walk down from the root while a child holds the base's choice."""
    parent, node, nodes = tree.parent.tolist(), 0, [0]
    while True:
        children = [n for n in range(len(parent)) if parent[n] == node and draft_tokens[n] == choices[node]]
        if not children:
            return nodes, choices[node]
        node = children[0]
        nodes.append(node)
