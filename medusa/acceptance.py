"""Acceptance: which drafted path the base model agrees with.

The base makes its own choice at a node of the tree: the argmax of its logits there when decoding greedily. The longest
drafted path that consists of these choices is accepted, and the base's choice after its last node comes on top, so the
output is the one that the base would have written alone. The root is the base's own token and always accepted.
Sampled rows have rules of their own, in `sampling_rule.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .draft import Draft


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


@dataclass(frozen=True)
class Failure:
    """Why a row could not choose a token. num_tokens: how many it had chosen before in this step; what it was given
    after these means nothing."""

    num_tokens: int
    error: Exception


class AcceptanceRule(Protocol):
    """How the base's logits decide. Rows are the live ones, in order.

    failures: of rows, by number, since the rule was made. The others are as they would be without them.
    """

    @property
    def failures(self) -> Mapping[int, Failure]: ...

    def first(self, logits: Tensor, row: int) -> Tensor:
        """logits [1, V] after the prompt of a new row -> its first token, int64 [1]."""
        ...

    def accept(self, draft: Draft, logits: Tensor) -> Acceptance:
        """logits [B, N, V], the base's at every node."""
        ...


@dataclass(frozen=True)
class EveryNode:
    """The base chooses at all nodes at once. choose: logits [..., V] -> token ids [...]."""

    choose: Callable[[Tensor], Tensor]
    failures: Mapping[int, Failure] = field(default_factory=dict)

    def first(self, logits: Tensor, row: int) -> Tensor:
        return self.choose(logits)

    def accept(self, draft: Draft, logits: Tensor) -> Acceptance:
        return accept(draft, self.choose(logits))


def choose_best(logits: Tensor) -> Tensor:
    """Greedy decoding. [..., V] -> int64 [...]."""
    return logits.argmax(dim=-1)


GREEDY = EveryNode(choose_best)


def accept(draft: Draft, choices: Tensor) -> Acceptance:
    """Accept the longest path whose every token is the base's own choice at its parent.

    choices: int64 [B, N], the base's own tokens at each node. Siblings hold different tokens, so at most one path goes
    on at each node and the longest one is unique. With argmax choices this is greedy decoding.
    """
    matched = draft.tokens == choices.gather(1, draft.parent.clamp(min=0))
    matched[:, 0] = True
    agreed = ~(draft.mask & ~matched[:, None]).any(dim=-1)  # [B, N]: the node and all its ancestors
    last = draft.depth.masked_fill(~agreed, -1).argmax(dim=1)
    return accept_path(draft, last, choices.gather(1, last[:, None])[:, 0])


def accept_path(draft: Draft, last: Tensor, bonus: Tensor) -> Acceptance:
    """Accept the path from the root to node `last`; both int64 [B]."""
    counts = draft.depth.gather(1, last[:, None])[:, 0] + 1
    rows = torch.arange(len(last), device=last.device)
    path = draft.mask[rows, last].to(torch.int8)  # ancestors, in the order of their depth
    nodes = path.argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())]
    nodes = nodes.masked_fill(torch.arange(nodes.shape[1], device=last.device) >= counts[:, None], 0)
    return Acceptance(nodes, counts, bonus)


def slow_accept(parent: list[int], draft_tokens: list[int], choices: list[int]) -> tuple[list[int], int]:
    """The obvious reference for one row: walk down from the root while a child holds the base's choice."""
    node, nodes = 0, [0]
    while True:
        children = [n for n in range(len(parent)) if parent[n] == node and draft_tokens[n] == choices[node]]
        if not children:
            return nodes, choices[node]
        node = children[0]
        nodes.append(node)
