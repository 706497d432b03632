"""Acceptance counts against slow recounts, and the best tree against every tree there is."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa.acceptance_statistics import AcceptanceStatistics, best_tree, tree_family, true_ranks
from medusa.tree import DraftTree

MISS = 3


def count(ranks: Tensor, max_rank: int = MISS) -> AcceptanceStatistics:
    statistics = AcceptanceStatistics(ranks.shape[1], max_rank)
    statistics.update(ranks)
    return statistics


def correlated_ranks(num_positions: int, num_heads: int, seed: int, max_rank: int = MISS) -> Tensor:
    """Some positions are hard for every head, as in real text: no product of marginals describes them."""
    generator = torch.Generator().manual_seed(seed)
    hard = torch.rand(num_positions, 1, generator=generator) * 3
    noise = -torch.log(torch.rand(num_positions, num_heads, generator=generator))
    return (noise * hard * torch.arange(1, num_heads + 1)).long().clamp(max=max_rank)


def slow_expected_length(ranks: Tensor, tree: DraftTree, max_rank: int) -> float:
    """Walk every position down the tree by hand."""
    total = 0
    for row in ranks.tolist():
        path: tuple[int, ...] = ()
        while len(path) < len(row) and row[len(path)] < max_rank and (*path, row[len(path)]) in tree.node_paths:
            path = (*path, row[len(path)])
        total += 1 + len(path)
    return total / len(ranks)


def all_trees(num_heads: int, max_rank: int, num_nodes: int) -> list[DraftTree]:
    """Every prefix-closed tree with exactly `num_nodes` nodes."""
    paths = [path for depth in range(1, num_heads + 1) for path in product(range(max_rank), repeat=depth)]
    trees = []
    for chosen in combinations(paths, num_nodes - 1):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            trees.append(DraftTree.from_paths(chosen))
    return trees


def test_true_ranks_count_better_logits_with_ties_by_id() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.0, 2.0], [5.0, 1.0, 1.0, 0.0], [0.0, 0.0, 9.0, 1.0]])
    assert true_ranks(logits, torch.tensor([1, 2, 0]), 10).tolist() == [0, 2, 2]
    assert true_ranks(logits, torch.tensor([3, -1, 0]), 2).tolist() == [2, 2, 2], "capped, unknown token, capped"


def test_true_ranks_agree_with_topk() -> None:
    logits, targets = torch.randn(200, 50), torch.randint(50, (200,))
    best = logits.topk(5).indices
    slow = [row.tolist().index(target) if target in row else 5 for row, target in zip(best, targets, strict=True)]
    assert true_ranks(logits, targets, 5).tolist() == slow


def test_counts_are_joint_and_end_at_the_first_miss() -> None:
    statistics = count(torch.tensor([[0, 1], [0, 1], [0, MISS], [MISS, 0], [9, 9]]))
    assert statistics.matches == {(0, 1): 2, (0,): 1, (): 2}
    assert statistics.rank_counts == [[3, 0, 0, 2], [1, 2, 0, 2]]
    assert statistics.num_positions == 5
    torch.testing.assert_close(statistics.accuracy_by_rank()[0], torch.tensor([0.6, 0, 0], dtype=torch.float64))


def test_expected_length_by_hand() -> None:
    statistics = count(torch.tensor([[0, 0], [0, 1], [1, 0], [MISS, 0]]))
    assert statistics.expected_length(DraftTree.root_only()) == 1.0
    assert statistics.expected_length(DraftTree.chain(2)) == 1 + 2 / 4 + 1 / 4
    # Head 1 is right at rank 0 in the last row too, but its parent was wrong there: nothing is accepted.
    assert statistics.expected_length(DraftTree.from_paths([(0,), (0, 0), (1,), (1, 0)])) == 1 + 3 / 4 + 2 / 4


def test_a_product_of_accuracies_would_be_wrong_here() -> None:
    """Two heads that are right together half of the time: a product of marginals would say a quarter."""
    statistics = count(torch.tensor([[0, 0], [MISS, MISS]] * 10))
    assert statistics.path_probabilities([(0, 0)]) == [0.5]
    assert statistics.accuracy_by_rank()[:, 0].prod().item() == 0.25


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.integers(1, 6))
def test_best_tree_is_the_best_of_all_trees(seed: int, shape: tuple[int, int], num_nodes: int) -> None:
    num_heads, max_rank = shape
    ranks = correlated_ranks(60, num_heads, seed, max_rank)
    tree = best_tree(count(ranks, max_rank), num_nodes)
    found = slow_expected_length(ranks, tree, max_rank)
    best = max(slow_expected_length(ranks, other, max_rank) for other in all_trees(num_heads, max_rank, num_nodes))
    assert found == pytest.approx(best, abs=1e-12)
    assert found == pytest.approx(count(ranks, max_rank).expected_length(tree), abs=1e-12)


def test_brute_force_tells_trees_apart() -> None:
    """The control: by accuracy alone head 1's first guess belongs below (0,), where it is never right."""
    ranks = torch.tensor([[0, MISS]] * 4 + [[1, 0]] * 3)
    tempting = slow_expected_length(ranks, DraftTree.chain(2), MISS)
    best = max(slow_expected_length(ranks, tree, MISS) for tree in all_trees(2, 2, 3))
    assert tempting == 1 + 4 / 7 and best == 1 + 7 / 7
    assert best_tree(count(ranks), 4).node_paths == ((0,), (1,), (1, 0))


def test_paths_that_never_came_true_are_left_out() -> None:
    tree = best_tree(count(torch.tensor([[0, MISS], [1, 0]])), num_nodes=50)
    assert tree.node_paths == ((0,), (1,), (1, 0))
    assert best_tree(AcceptanceStatistics(2, 3), 8).num_nodes == 1
    with pytest.raises(ValueError, match="num_nodes is 0, expected at least 1"):
        best_tree(AcceptanceStatistics(2, 3), 0)


def test_tree_family_grows_and_nests() -> None:
    family = tree_family(count(correlated_ranks(500, 3, seed=0)), [1, 4, 8, 12])
    taus = [tau for _, _, tau in family]
    assert taus[0] == 1.0 and taus == sorted(taus) and len(set(taus)) == 4
    for (_, small, _), (size, large, _) in zip(family, family[1:], strict=False):
        assert set(small.node_paths) < set(large.node_paths) and large.num_nodes == size


def test_merge_equals_counting_everything_at_once() -> None:
    ranks = correlated_ranks(300, 3, seed=5)
    merged = count(ranks[:100]).merge(count(ranks[100:]))
    assert merged == count(ranks)
    with pytest.raises(ValueError, match="cannot merge 3 heads x 3 ranks with 2 x 3"):
        merged.merge(AcceptanceStatistics(2, 3))


@pytest.mark.parametrize("max_paths", [1, 2, 5, 20, 1000])
def test_compact_keeps_marginals_and_never_flatters(max_paths: int) -> None:
    full = count(correlated_ranks(2000, 4, seed=2, max_rank=5), max_rank=5)
    small = full.compact(max_paths)
    assert len(small.matches) <= max_paths or len(full.matches) <= max_paths
    assert sum(small.matches.values()) == full.num_positions and small.rank_counts == full.rank_counts
    for size in (2, 8, 32):
        tree = best_tree(full, size)
        assert small.expected_length(tree) <= full.expected_length(tree)


def test_compact_without_a_miss_of_head_0_still_fits() -> None:
    full = count(torch.tensor([[0], [1], [2]]))
    assert len(full.compact(2).matches) == 2 and sum(full.compact(2).matches.values()) == 3


@pytest.mark.parametrize(
    "ranks, message",
    [
        (torch.zeros(4, 3, dtype=torch.long), r"shape \[4, 3\].*expected whole numbers \[positions, 2\]"),
        (torch.zeros(4, 2), "torch.float32"),
        (torch.tensor([[0, -1]]), "a rank is negative"),
    ],
)
def test_wrong_ranks_are_refused(ranks: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptanceStatistics(2, MISS).update(ranks)


def test_no_positions_is_no_division_by_zero() -> None:
    statistics = AcceptanceStatistics(2, MISS)
    statistics.update(torch.zeros(0, 2, dtype=torch.long))
    assert statistics.expected_length(DraftTree.chain(2)) == 1.0
    with pytest.raises(ValueError, match="num_heads 0"):
        AcceptanceStatistics(0, 1)
