"""Which path is accepted, on choices written by hand and against the slow reference."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.acceptance import accept, slow_accept
from medusa.tree import DraftTree

TREE = DraftTree.cartesian([2, 2])  # nodes: root, 0, 1, 00, 01, 10, 11


def accepted(tree, draft_tokens, choices):
    result = accept(tree, torch.tensor(draft_tokens), torch.tensor(choices))
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
        assert (nodes[row], bonus[row]) == slow_accept(tree, drafts[row].tolist(), choices[row].tolist())
