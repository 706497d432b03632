"""How trees grown anew in each step do on held-out text: what they promise, what they keep, how they look."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .budget import AdaptiveBudget
from .candidates import Candidates
from .draft import NO_TOKEN, Draft
from .tree import DraftTree, Path


@dataclass(frozen=True)
class DynamicTree:
    """promised, kept: tau at N = 1, 2, ... by the heads' probabilities, and as it came true. typical: the rank paths
    that are drafted most often, as many as on average. The others: means over steps when each chooses its own N."""

    promised: tuple[float, ...]
    kept: tuple[float, ...]
    typical: DraftTree
    num_nodes: float
    tau: float
    speedup: float


@dataclass
class DynamicStatistics:
    """Sums over positions of held-out text, each taken as a step of one row without a history."""

    budget: AdaptiveBudget
    num_positions: int = 0
    _promised: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    _kept: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    _paths: Counter[Path] = field(default_factory=Counter)
    _nodes: int = 0
    _tokens: float = 0.0
    _seconds: float = 0.0

    def update(self, candidates: Candidates, truth: Tensor) -> None:
        """truth: int64 [B, K], the tokens that come after each root."""
        draft = Draft.of_parents(candidates.tokens, candidates.parent)
        accepted = accepted_nodes(draft, truth).double()
        self.num_positions += len(truth)
        self._promised = _added(self._promised, candidates.probability.double().cumsum(dim=1).sum(dim=0).cpu())
        self._kept = _added(self._kept, accepted.cumsum(dim=1).sum(dim=0).cpu())
        one = torch.ones(1)
        for row in range(len(truth)):
            num_nodes = self.budget.choose(candidates.probability[row : row + 1], one).num_nodes
            self._nodes += num_nodes
            self._tokens += float(accepted[row, :num_nodes].sum())
            self._seconds += self.budget.seconds(num_nodes)
            self._paths.update(rank_paths(candidates, row)[:num_nodes])

    def summary(self) -> DynamicTree:
        total = self.num_positions
        num_nodes = self._nodes / total
        common = sorted(self._paths.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
        typical = DraftTree.from_paths([path for path, _ in common if path][: round(num_nodes) - 1])
        speedup = self._tokens * self.budget.latency.curve[1] / self._seconds
        promised, kept = (tuple((sums / total).tolist()) for sums in (self._promised, self._kept))
        return DynamicTree(promised, kept, typical, num_nodes, self._tokens / total, speedup)


def _added(total: Tensor, new: Tensor) -> Tensor:
    """Sums over N; a batch whose largest draft is smaller stays as good at more nodes."""
    size = max(len(total), len(new))
    return sum((_stretched(sums, size) for sums in (total, new)), torch.zeros(size, dtype=torch.float64))


def _stretched(sums: Tensor, size: int) -> Tensor:
    if not len(sums):
        return torch.zeros(size, dtype=torch.float64)
    return torch.cat([sums, sums[-1:].expand(size - len(sums))])


def accepted_nodes(draft: Draft, truth: Tensor) -> Tensor:
    """bool [B, N]: nodes whose path comes true, the root's always does. truth: int64 [B, K], tokens after the root."""
    depth = draft.depth.clamp(max=truth.shape[1])
    right = draft.tokens == truth.gather(1, (depth - 1).clamp(min=0))
    right = (right & (draft.depth <= truth.shape[1])) | (draft.depth == 0)
    return ~(draft.mask & ~right[:, None]).any(dim=-1)


def rank_paths(candidates: Candidates, row: int) -> list[Path]:
    """Rank path of each node of a row: its place among its siblings, likeliest first."""
    num_children: Counter[int] = Counter()
    paths: list[Path] = [()]
    tokens, parents = candidates.tokens[row].tolist(), candidates.parent[row].tolist()
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        if token == NO_TOKEN:
            break
        paths.append((*paths[parent], num_children[parent]))
        num_children[parent] += 1
    return paths
