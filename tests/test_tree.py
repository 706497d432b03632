"""Draft trees: their tensors against brute force, and the shapes that are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.config import HeadsConfig
from medusa.drafter import RootDrafter
from medusa.heads import MedusaHeads
from medusa.heads_drafter import StaticTreeDrafter
from medusa.tree import DraftTree

PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=12)
TREES = PATHS.map(lambda paths: DraftTree.from_paths({p[:d] for p in paths for d in range(1, len(p) + 1)}))


@given(TREES)
def test_tensors_follow_from_the_paths(tree):
    nodes = [(), *tree.node_paths]
    assert tree.num_nodes == len(nodes) and tree.max_depth == max(map(len, nodes))
    assert tree.depth.tolist() == [len(path) for path in nodes]
    assert tree.parent.tolist() == [-1 if not path else nodes.index(path[:-1]) for path in nodes]
    assert tree.rank.tolist() == [path[-1] if path else 0 for path in nodes]
    assert tree.attention_mask.tolist() == [[a == b[: len(a)] for a in nodes] for b in nodes]
    leaves = [path for path in nodes if not any(other[:-1] == path for other in nodes if other)]
    expected = [[nodes.index(leaf[:d]) for d in range(len(leaf) + 1)] for leaf in leaves]
    padded = [row + [-1] * (tree.max_depth + 1 - len(row)) for row in expected]
    assert sorted(tree.paths.tolist()) == sorted(padded)
    assert (tree.parent[1:] < torch.arange(1, tree.num_nodes)).all()


@given(TREES)
def test_a_tree_survives_json(tree):
    assert DraftTree.from_paths(tree.to_list()) == tree


def test_chain_cartesian_and_root_only():
    assert DraftTree.chain(3).to_list() == [[0], [0, 0], [0, 0, 0]]
    assert DraftTree.cartesian([2, 1]).to_list() == [[0], [1], [0, 0], [1, 0]]
    assert DraftTree.root_only().num_nodes == 1 and DraftTree.root_only().max_width == 0


@pytest.mark.parametrize(
    "paths, max_depth, message",
    [
        ([[0, 1]], None, "needs its prefix"),
        ([[0], [-1]], None, "negative rank"),
        ([[0], [0, 0], [0, 0, 0]], 2, "has depth 3, but there are 2 heads"),
        ([[]], None, "root"),
    ],
)
def test_shapes_that_are_no_tree_are_refused(paths, max_depth, message):
    with pytest.raises(ValueError, match=message):
        DraftTree.from_paths(paths, max_depth=max_depth)


def heads(num_heads=2, draft_vocab_size=4):
    ids = torch.tensor([3, 5, 8, 13])
    config = HeadsConfig(num_heads, 1, 8, 16, draft_vocab_size=draft_vocab_size)
    made = MedusaHeads(config, ids)
    made.init_from_base(*[torch.randn(16, 8)] * 2)
    return made


def test_trees_beyond_the_heads_are_refused():
    """Not an index out of range, nor silently the next head's guesses, in the middle of an answer."""
    with pytest.raises(ValueError, match="has depth 3, but there are 2 heads"):
        StaticTreeDrafter(heads(), DraftTree.chain(3))
    with pytest.raises(ValueError, match="rank 4 is asked for, but the heads guess among 4 tokens"):
        StaticTreeDrafter(heads(), DraftTree.cartesian([5]))


def test_a_node_holds_its_heads_guess_of_its_rank():
    drafter = StaticTreeDrafter(heads(), DraftTree.cartesian([3, 2]))
    hidden, root = torch.randn(5, 8), torch.arange(5)
    tokens = drafter.propose(root, hidden).tokens
    best = drafter.heads(hidden).topk(3).indices  # [K, B, 3]
    for row in range(5):
        assert tokens[row, 0] == root[row]
        for node, path in enumerate(drafter.tree.node_paths, start=1):
            index = best[len(path) - 1, row, path[-1]]
            assert tokens[row, node] == drafter.heads.draft_token_ids[index]


def test_no_autograd_graph_is_kept():
    made = heads()
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    tokens = (
        StaticTreeDrafter(made, DraftTree.chain(2)).propose(torch.zeros(1, dtype=torch.int64), torch.randn(1, 8)).tokens
    )
    assert tokens.grad_fn is None


def test_the_root_drafter_drafts_nothing():
    assert RootDrafter().propose(torch.tensor([4, 7]), torch.randn(2, 8)).tokens.tolist() == [[4], [7]]
