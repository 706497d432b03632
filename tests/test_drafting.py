"""Which drafter comes of which options, and what is refused."""

from __future__ import annotations

import pytest
import torch

from medusa.budget import AdaptiveDrafter
from medusa.calibration import AcceptanceStatistics, best_tree, choose_tree
from medusa.config import HeadsConfig
from medusa.drafting import make_drafter, node_limit, smallest_chance
from medusa.dynamic_tree import DynamicTreeDrafter
from medusa.heads import MedusaHeads
from medusa.heads_drafter import StaticTreeDrafter
from medusa.latency_curve import StepLatency
from medusa.lookup import LookupDrafter
from medusa.tree import DraftTree


@pytest.fixture
def heads():
    made = MedusaHeads(HeadsConfig(2, 1, 8, 16))
    made.init_from_base(*[torch.randn(16, 8)] * 2)
    return made


@pytest.fixture
def calibration():
    statistics = AcceptanceStatistics(2, 4)
    statistics.update(torch.tensor([[0, 0], [1, 1], [0, 4], [0, 1], [2, 0]]))
    return choose_tree(statistics, {1: 1.0, 4: 1.1, 32: 1.9}, propose_seconds=0.1, temperatures=(1.2, 0.8))


def test_calibrated_heads_draft_dynamically_with_lookup(heads, calibration):
    drafter = make_drafter(heads, calibration.tree, calibration)
    assert isinstance(drafter, AdaptiveDrafter) and isinstance(drafter.inner, LookupDrafter)
    assert drafter.budget.latency == calibration.latency and calibration.latency.propose_seconds == 0.1
    dynamic = drafter.inner.inner
    assert isinstance(dynamic, DynamicTreeDrafter) and dynamic.temperatures == [1.2, 0.8]
    assert dynamic.smallest_chance(1) == smallest_chance(calibration.latency, 1, dynamic.max_nodes) > 0
    assert dynamic.smallest_chance(4) > dynamic.smallest_chance(1), "nodes of many rows cost more"
    assert drafter.max_nodes == dynamic.max_nodes == node_limit(calibration.latency_curve, calibration.tree.num_nodes)


def test_heads_without_a_calibration_draft_their_tree(heads):
    drafter = make_drafter(heads, DraftTree.chain(2), None)
    assert isinstance(drafter, StaticTreeDrafter) and drafter.tree == DraftTree.chain(2)


def test_options_are_composed(heads, calibration):
    def make(**options):
        return make_drafter(heads, calibration.tree, calibration, **options)

    static = make(tree="static", lookup=False)
    assert isinstance(static, StaticTreeDrafter) and static.tree == calibration.tree
    smaller = make(tree="static", lookup=False, budget=3)
    assert smaller.tree == best_tree(calibration.statistics, 3) and smaller.max_nodes == 3
    fixed = make(tree="dynamic", lookup=True, budget=7)
    assert fixed.inner.smallest_chance(1) == 0.0, "a budget that is given is filled"
    assert isinstance(fixed, LookupDrafter) and fixed.max_nodes == fixed.inner.max_nodes == 7
    assert fixed.propose(torch.tensor([1]), torch.randn(1, 8)).num_nodes == 7
    alone = make(tree="none", lookup=True)
    assert isinstance(alone, AdaptiveDrafter) and alone.inner.inner is None
    merged = make(tree="static", lookup=True).inner.inner
    paths = merged.tree.node_paths
    assert merged._probability[1:].tolist() == pytest.approx(calibration.statistics.path_probabilities(paths))


def test_what_cannot_be_is_refused(heads, calibration):
    with pytest.raises(ValueError, match="no budget and no calibration to choose one by"):
        make_drafter(heads, DraftTree.chain(2), None, tree="dynamic")
    with pytest.raises(ValueError, match="budget of 4 nodes for a static tree without a calibration"):
        make_drafter(heads, DraftTree.chain(2), None, tree="static", budget=4)
    with pytest.raises(ValueError, match="budget is 0"):
        make_drafter(heads, calibration.tree, calibration, budget=0)
    with pytest.raises(ValueError, match='tree "none" without lookup'):
        make_drafter(heads, calibration.tree, calibration, tree="none", lookup=False, budget=4)
    with pytest.raises(ValueError, match=r"path \[0, 0, 0\] has depth 3, but there are 2 heads"):
        make_drafter(heads, DraftTree.chain(3), calibration)
    with pytest.raises(ValueError, match=r"path \[16\]: rank 16 is asked for, but the heads guess among 16 tokens"):
        make_drafter(heads, DraftTree.from_paths([(16,)]), calibration)


def test_the_limit_stays_near_what_pays():
    curve = {1: 1.0, 64: 2.0}
    assert node_limit(curve, 1) == 17 and node_limit(curve, 20) == 40 and node_limit(curve, 50) == 64
    assert node_limit({1: 1.0, 8: 2.0}, 4) == 8


def test_nodes_that_cannot_pay_are_not_asked_below():
    assert smallest_chance(StepLatency({1: 1.0, 21: 2.0}), 1, 21) == pytest.approx(0.025)
    assert smallest_chance(StepLatency({1: 1.0, 16: 0.9}), 1, 16) == 0.0
    assert smallest_chance(StepLatency({1: 1.0}), 1, 1) == 0.0
