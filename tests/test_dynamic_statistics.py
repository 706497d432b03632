"""What dynamic trees promise and keep, counted against a walk by hand."""

from __future__ import annotations

import pytest
import torch

from medusa.budget import AdaptiveBudget
from medusa.candidates import Candidates
from medusa.draft import NO_TOKEN, Draft
from medusa.dynamic_statistics import DynamicStatistics, accepted_nodes, rank_paths
from medusa.latency_curve import StepLatency

# 9 -> (1 -> (3, 4), 2 -> 3), and a row that is filled up
TOKENS = torch.tensor([[9, 1, 2, 3, 3, 4], [9, 2, 1, NO_TOKEN, NO_TOKEN, NO_TOKEN]])
PARENT = torch.tensor([[-1, 0, 0, 1, 2, 1], [-1, 0, 0, 0, 0, 0]])
CHANCES = torch.tensor([[1.0, 0.5, 0.4, 0.3, 0.2, 0.1], [1.0, 0.6, 0.3, 0.0, 0.0, 0.0]])
CANDIDATES = Candidates(TOKENS, PARENT, CHANCES)


@pytest.mark.parametrize(
    "truth, accepted",
    [([1, 3], [0, 1, 3]), ([1, 4], [0, 1, 5]), ([2, 3], [0, 2, 4]), ([2, 4], [0, 2]), ([5, 3], [0]), ([1], [0, 1])],
)
def test_nodes_are_accepted_with_their_ancestors_only(truth, accepted):
    draft = Draft.of_parents(TOKENS[:1], PARENT[:1])
    assert accepted_nodes(draft, torch.tensor([truth]))[0].nonzero().flatten().tolist() == accepted


def test_ranks_are_places_among_siblings():
    assert rank_paths(CANDIDATES, 0) == [(), (0,), (1,), (0, 0), (1, 0), (0, 1)]
    assert rank_paths(CANDIDATES, 1) == [(), (0,), (1,)]


def test_sums_are_those_of_each_step():
    free = DynamicStatistics(AdaptiveBudget(StepLatency({1: 1.0, 6: 1.0}, 0.5)))
    free.update(CANDIDATES, torch.tensor([[1, 4], [1, 4]]))
    free.update(CANDIDATES.cut(2), torch.tensor([[1, 4], [2, 4]]))
    found = free.summary()
    # kept with N nodes: rows of the first batch 1 2 2 2 2 3 and 1 1 2 2 2 2; of the second 1 2 and 1 2
    assert found.kept == pytest.approx((1.0, 7 / 4, 8 / 4, 8 / 4, 8 / 4, 9 / 4))
    assert found.promised == pytest.approx((1.0, 1.55, 1.725, 1.8, 1.85, 1.875))
    assert found.num_nodes == (6 + 3 + 2 + 2) / 4, "free forwards want every node that has a chance"
    assert found.tau == 9 / 4 and found.speedup == pytest.approx((9 / 4) / 1.5)
    assert found.typical.to_list() == [[0], [1]]


def test_dear_forwards_want_no_nodes():
    dear = DynamicStatistics(AdaptiveBudget(StepLatency({1: 1.0, 2: 9.0})))
    dear.update(CANDIDATES, torch.tensor([[1, 4], [1, 4]]))
    found = dear.summary()
    assert (found.num_nodes, found.tau, found.speedup) == (1.0, 1.0, 1.0) and found.typical.num_nodes == 1
