"""Acceptance under sampling: `rejection`, which is lossless, and `typical`, which is not, each row as it asks for.

**Rejection.** Speculative sampling accepts a drafted token x with probability min(1, p(x) / q(x)) and draws from the
residual max(0, p - q), normalised, where it is refused; p is the base's distribution, q the draft's. Our drafts are
deterministic: given the context, a node's children hold tokens c1, c2, ... for certain, so each proposal is one-hot.
Child c1 is then accepted with probability p(c1), and the residual is p without c1, normalised; c2 is accepted with
probability p(c2) / (1 - p(c1)), and so on; where all are refused, the token comes from p without the children. That is
the same as drawing one sample from p and going to the child that holds it, the sample being the bonus token where none
does. A node is passed with probability p(c1) + p(c2) + ..., and no rule that keeps p can do better with these children.

p is the base's after penalties, processors and truncations computed on that node's own path. Nothing is drawn or
computed at nodes that are not reached: one distribution and one uniform number for every emitted token, in order, as in
plain sampling. So a seed gives the same tokens whatever is drafted, and a processor with a state sees each token once.

**Typical** (lossy): see `Typical`. Drafted paths whose every token is plausible are candidates, the longest is accepted
(of equally long ones the likelier), and the base's likeliest token follows, so the output is not random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .acceptance import GREEDY, Acceptance, AcceptanceRule, Failure, accept_path
from .draft import NO_TOKEN, Draft
from .row_sampler import RowSampler, RowSamplers

# (rows, nodes), int64 [n] each -> float32 scores [n, V]
NodeScores = Callable[[Tensor, Tensor], Tensor]


def rule_for(samplers: Sequence[RowSampler]) -> AcceptanceRule:
    """The rule for the rows of a step, in order; greedy ones alone take the fast way."""
    return GREEDY if all(sampler.is_plain_greedy for sampler in samplers) else SamplingRule(samplers)


class SamplingRule:
    """Each row as its sampler says."""

    def __init__(self, samplers: Sequence[RowSampler]) -> None:
        self.samplers = RowSamplers(samplers)
        self._typical = [sampler.typical for sampler in samplers]

    @property
    def failures(self) -> Mapping[int, Failure]:
        return self.samplers.failures

    def first(self, logits: Tensor, row: int) -> Tensor:
        rows = torch.tensor([row], device=logits.device)
        scores = self.samplers.scores(rows, torch.zeros_like(rows), logits, lambda row, node: [])
        return scores.argmax(dim=-1) if self._typical[row] else self.samplers.choose(rows, scores)

    def accept(self, draft: Draft, logits: Tensor) -> Acceptance:
        scores = self._node_scores(draft, logits)
        is_typical = torch.tensor([rule is not None for rule in self._typical], device=logits.device)
        last, bonus = walk(draft, (~is_typical).nonzero().flatten(), self._choose(scores))
        if bool(is_typical.any()):
            rows = is_typical.nonzero().flatten()
            epsilon, delta = self._thresholds(logits)
            last[rows], bonus[rows] = typical_walk(draft, rows, scores, epsilon, delta)
        return accept_path(draft, last, bonus)

    def _node_scores(self, draft: Draft, logits: Tensor) -> NodeScores:
        drafted = DraftedPaths(draft)
        return lambda rows, nodes: self.samplers.scores(rows, nodes, logits[rows, nodes], drafted)

    def _choose(self, scores: NodeScores) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda rows, nodes: self.samplers.choose(rows, scores(rows, nodes))

    def _thresholds(self, logits: Tensor) -> Tensor:
        """float32 [2, B]: epsilon and delta of the typical rows, 0 elsewhere."""
        pairs = [(rule.epsilon, rule.delta) if rule else (0.0, 0.0) for rule in self._typical]
        return torch.tensor(pairs, device=logits.device).T


class DraftedPaths:
    """(row, node) -> drafted tokens from below the root to the node."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._lists: tuple[list[list[int]], list[list[int]]] | None = None

    def __call__(self, row: int, node: int) -> list[int]:
        if self._lists is None:
            self._lists = self._draft.tokens.tolist(), self._draft.parent.tolist()
        tokens, parent = self._lists[0][row], self._lists[1][row]
        path: list[int] = []
        while node > 0:
            path.append(tokens[node])
            node = parent[node]
        return path[::-1]


def walk(draft: Draft, rows: Tensor, choose: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Down from the root of `rows`, int64 [n], along children that hold the token chosen at their parent.

    choose: (rows, nodes) -> tokens, int64 [m] each; called once a depth for the rows that got there. Returns for all B
    rows the last node and the token chosen there, int64 [B]; both 0 in rows that were not walked.
    """
    last = torch.zeros(len(draft.tokens), dtype=torch.int64, device=draft.tokens.device)
    chosen = torch.zeros_like(last)
    while len(rows):
        tokens = choose(rows, last[rows])
        chosen[rows] = tokens
        child = (draft.parent[rows] == last[rows, None]) & (draft.tokens[rows] == tokens[:, None])
        found = child.any(dim=1)
        rows = rows[found]
        last[rows] = child[found].int().argmax(dim=1)
    return last, chosen


def typical_walk(
    draft: Draft, rows: Tensor, scores: NodeScores, epsilon: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """LOSSY. For `rows`, int64 [n]: the last node of the longest plausible path, and the base's best token there.

    epsilon, delta: float32 [B]. Distributions are computed at the nodes that plausible paths reach, depth by depth.
    """
    likelihood = torch.full(draft.tokens.shape, -torch.inf, device=draft.tokens.device)  # -inf: not accepted
    likelihood[:, 0] = 0.0
    best = torch.zeros_like(draft.tokens)
    at_row, at_node = rows, torch.zeros_like(rows)
    while len(at_row):
        p = scores(at_row, at_node).softmax(dim=-1)
        best[at_row, at_node] = p.argmax(dim=-1)
        entropy = torch.special.entr(p).sum(dim=-1)
        threshold = torch.minimum(epsilon[at_row], delta[at_row] * (-entropy).exp())
        tokens = draft.tokens[at_row]
        of_token = p.gather(1, tokens.clamp(min=0))
        is_child = (draft.parent[at_row] == at_node[:, None]) & (tokens != NO_TOKEN)
        parent, child = (is_child & (of_token > threshold[:, None])).nonzero().unbind(dim=1)
        so_far = likelihood[at_row[parent], at_node[parent]]
        at_row, at_node = at_row[parent], child
        likelihood[at_row, at_node] = so_far + of_token[parent, child].log()
    likelihood, depth = likelihood[rows], draft.depth[rows]
    depth = depth.masked_fill(likelihood == -torch.inf, -1)
    longest = depth == depth.amax(dim=1, keepdim=True)
    last = likelihood.masked_fill(~longest, -torch.inf).argmax(dim=1)
    return last, best[rows, last]
