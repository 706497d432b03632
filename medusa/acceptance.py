"""Acceptance: which drafted path the base model agrees with.

The base makes its own choice at every node of the tree: the argmax of its logits when decoding greedily. The longest
drafted path that consists of these choices is accepted, and the base's choice after its last node comes on top, so the
output is the one that the base would have written alone. The root is the base's own token and always accepted.
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


def accept(tree: DraftTree, draft_tokens: Tensor, choices: Tensor) -> Acceptance:
    """Accept the longest path whose every token is the base's own choice at its parent.

    draft_tokens and choices: int64 [B, N]; choices are the base's own tokens at each node. Siblings hold
    different tokens, so at most one path goes on at each node and the longest one is unique up to its end. With
    argmax choices this is greedy decoding.
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


def slow_accept(tree: DraftTree, draft_tokens: list[int], choices: list[int]) -> tuple[list[int], int]:
    """The obvious reference for one row: walk down from the root while a child holds the base's choice."""
    parent, node, nodes = tree.parent.tolist(), 0, [0]
    while True:
        children = [n for n in range(len(parent)) if parent[n] == node and draft_tokens[n] == choices[node]]
        if not children:
            return nodes, choices[node]
        node = children[0]
        nodes.append(node)
