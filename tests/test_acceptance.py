"""Which path is accepted, on choices written by hand and against the slow reference."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.acceptance import accept, slow_accept
from medusa.draft import NO_TOKEN, Draft
from medusa.tree import DraftTree

TREE = DraftTree.cartesian([2, 2])  # nodes: root, 0, 1, 00, 01, 10, 11


def accepted(tree, draft_tokens, choices):
    result = accept(Draft.of_tree(tree, torch.tensor(draft_tokens)), torch.tensor(choices))
    rows = zip(result.nodes.tolist(), result.counts.tolist(), strict=True)
    return [nodes[:count] for nodes, count in rows], result.bonus.tolist(), result.last.tolist()


def test_scripted_choices():
    drafts = [9, 20, 21, 30, 31, 32, 33]
    choices = [
        [20, 31, 0, 0, 77, 0, 0],  # 20, then 31, then a new token
        [21, 0, 33, 0, 0, 0, 78],  # the other branch
        [21, 0, 44, 0, 0, 0, 0],  # one accepted
        [50, 31, 33, 0, 0, 0, 0],  # nothing: the deeper matches hang on no accepted node
    ]
    nodes, bonus, last = accepted(TREE, [drafts] * 4, choices)
    assert nodes == [[0, 1, 4], [0, 2, 6], [0, 2], [0]]
    assert bonus == [77, 78, 44, 50] and last == [4, 6, 2, 0]


def test_padding_of_short_paths_is_never_accepted_as_token_zero():
    """A base that chooses token 0 after a leaf, where longer paths exist: the leaf's path ends there all the same."""
    tree = DraftTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
    nodes, bonus, _ = accepted(tree, [[0, 5, 6, 0, 0]], [[6, 0, 0, 0, 0]])
    assert nodes == [[0, 2]] and bonus == [0]


def test_root_only():
    nodes, bonus, last = accepted(DraftTree.root_only(), [[3], [4]], [[8], [9]])
    assert nodes == [[0], [0]] and bonus == [8, 9] and last == [0, 0]


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=10)


@given(PATHS, st.integers(1, 4), st.integers(0, 10_000))
def test_fast_is_slow(paths, batch, seed):
    """Few different tokens, so that long paths are accepted often; siblings differ, as drafts of one head do."""
    tree = DraftTree.from_paths({path[:d] for path in paths for d in range(1, len(path) + 1)})
    generator = torch.Generator().manual_seed(seed)
    drafts = tree.rank.expand(batch, -1)
    choices = torch.randint(0, 3, (batch, tree.num_nodes), generator=generator)
    nodes, bonus, _ = accepted(tree, drafts.tolist(), choices.tolist())
    for row in range(batch):
        assert (nodes[row], bonus[row]) == slow_accept(
            tree.parent.tolist(), drafts[row].tolist(), choices[row].tolist()
        )


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 10_000))
def test_rows_may_have_trees_of_their_own(batch, num_nodes, seed):
    """Random parents a row, some nodes filled up with no token."""
    generator = torch.Generator().manual_seed(seed)
    parent = torch.stack([torch.randint(0, max(n, 1), (batch,), generator=generator) for n in range(num_nodes)], dim=1)
    parent[:, 0] = -1
    tokens = torch.zeros_like(parent)
    for row in range(batch):  # siblings differ
        for node in range(1, num_nodes):
            tokens[row, node] = (parent[row, :node] == parent[row, node]).sum()
    tokens[:, 1:][torch.rand(batch, num_nodes - 1, generator=generator) < 0.2] = NO_TOKEN
    choices = torch.randint(0, 3, (batch, num_nodes), generator=generator)
    draft = Draft.of_parents(tokens, parent)
    result = accept(draft, choices)
    for row in range(batch):
        nodes, bonus = slow_accept(parent[row].tolist(), tokens[row].tolist(), choices[row].tolist())
        assert result.nodes[row, : result.counts[row]].tolist() == nodes and int(result.bonus[row]) == bonus
        assert draft.depth[row, nodes].tolist() == list(range(len(nodes)))


def test_a_draft_of_a_tree_is_that_of_its_parents():
    tokens = torch.randint(0, 9, (2, TREE.num_nodes))
    by_tree, by_parents = Draft.of_tree(TREE, tokens), Draft.of_parents(tokens, TREE.parent.expand(2, -1))
    assert torch.equal(by_tree.mask, by_parents.mask) and torch.equal(by_tree.depth, by_parents.depth)
