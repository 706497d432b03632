"""The dynamic tree against a brute-force optimum, for independent heads and for such that look at the prefix."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.candidates import Candidates, by_probability
from medusa.draft import NO_TOKEN, Draft
from medusa.dynamic_tree import DynamicTreeDrafter
from medusa.heads_drafter import StaticTreeDrafter
from medusa.tree import DraftTree
from scripted_heads import ScriptedHeads

DESIGNS = ("medusa", "scripted")


def paths_of(candidates: Candidates, row: int) -> dict[tuple[int, ...], float]:
    """Token path of each drafted node of a row -> its probability."""
    tokens, parents = candidates.tokens[row].tolist(), candidates.parent[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    probabilities = candidates.probability[row].tolist()
    return {p: c for p, c, token in zip(paths[1:], probabilities[1:], tokens[1:], strict=True) if token != NO_TOKEN}


@pytest.mark.parametrize("design", DESIGNS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), max_nodes=st.integers(1, 5), scale=st.sampled_from([0.3, 1.0, 4.0]))
def test_no_tree_of_that_size_is_better(design, seed, max_nodes, scale):
    """Every prefix-closed set of paths is tried."""
    heads = ScriptedHeads(2, [3, 7, 9], design=design, seed=seed, scale=scale)
    temperatures = [1.3, 0.7]
    candidates = DynamicTreeDrafter(heads, max_nodes, temperatures).candidates(torch.tensor([5]), torch.zeros(1, 4))
    chances = {
        path: heads.path_probability(0.0, 5, path, temperatures)
        for depth in (1, 2)
        for path in product(heads.ids.tolist(), repeat=depth)
    }
    trees = (
        nodes
        for nodes in combinations(chances, max_nodes - 1)
        if all(len(path) == 1 or path[:-1] in nodes for path in nodes)
    )
    best = max(sum(chances[path] for path in nodes) for nodes in trees)
    found = paths_of(candidates, 0)
    assert len(found) == max_nodes - 1 and candidates.num_nodes == max_nodes
    assert sum(chances[path] for path in found) == pytest.approx(best, abs=5e-6)
    assert found == pytest.approx({path: chances[path] for path in found}, abs=5e-6)


@pytest.mark.parametrize("design", DESIGNS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), max_nodes=st.integers(1, 40), batch=st.integers(1, 4), data=st.data())
def test_the_likeliest_paths_of_all_are_found_in_every_row(design, seed, max_nodes, batch, data):
    """Larger trees, several rows: a tree of the likeliest paths is prefix-closed, so it is the best one."""
    heads = ScriptedHeads(3, [2, 4, 6, 8], design=design, seed=seed, scale=data.draw(st.sampled_from([1.0, 5.0])))
    roots, hidden = torch.arange(batch), torch.arange(batch, dtype=torch.float32)[:, None].repeat(1, 4)
    candidates = DynamicTreeDrafter(heads, max_nodes).candidates(roots, hidden)
    for row in range(batch):
        chances = {
            path: heads.path_probability(float(row), row, path, [1.0] * 3)
            for depth in (1, 2, 3)
            for path in product(heads.ids.tolist(), repeat=depth)
        }
        expected = sorted(chances.values(), reverse=True)[: max_nodes - 1]
        found = paths_of(candidates, row)
        assert list(found.values()) == pytest.approx(expected, abs=5e-6)
        assert found == pytest.approx({path: chances[path] for path in found}, abs=5e-6)


@pytest.mark.parametrize("design", DESIGNS)
def test_any_number_of_them_is_a_tree(design):
    heads = ScriptedHeads(3, [2, 4, 6, 8], design=design)
    candidates = DynamicTreeDrafter(heads, 30).candidates(torch.tensor([1, 2]), torch.zeros(2, 4))
    for num_nodes in range(1, 31):
        draft = candidates.cut(num_nodes).draft()
        assert draft.num_nodes == num_nodes and (draft.parent[:, 1:] < torch.arange(1, num_nodes)).all()
        assert draft.tokens[:, 0].tolist() == [1, 2] and (draft.parent[:, 0] == -1).all()
    assert (candidates.probability.diff(dim=1) <= 0).all()


def test_nothing_grows_below_what_is_unlikely():
    heads = ScriptedHeads(3, [2, 4, 6, 8], design="scripted", scale=1.0)
    asked = []
    logits = heads.logits
    heads.logits = lambda head, hidden, prefix: asked.append(prefix.tolist()) or logits(head, hidden, prefix)
    root, hidden = torch.tensor([1]), torch.zeros(1, 4)
    found = paths_of(DynamicTreeDrafter(heads, 40, smallest_chance=lambda num_rows: 0.2).candidates(root, hidden), 0)
    chances = {path: heads.path_probability(0.0, 1, path, [1.0] * 3) for path in found}
    assert {tuple(prefix[1:]) for prefixes in asked for prefix in prefixes} == {
        (),
        *(path for path, chance in chances.items() if chance >= 0.2 and len(path) < 3),
    }
    assert all(len(path) == 1 or chances[path[:-1]] >= 0.2 for path in found)
    assert min(chances.values()) < 0.2, "what is not grown further may still be drafted"


def test_fewer_paths_than_asked_for():
    heads = ScriptedHeads(2, [2, 4])
    candidates = DynamicTreeDrafter(heads, 50).candidates(torch.tensor([1]), torch.zeros(1, 4))
    assert candidates.num_nodes == 1 + 2 + 4


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"got temperatures \[1.0\], expected 2 positive ones"):
        DynamicTreeDrafter(ScriptedHeads(2, [1, 2]), 4, [1.0])
    with pytest.raises(ValueError, match="expected 2 positive"):
        DynamicTreeDrafter(ScriptedHeads(2, [1, 2]), 4, [1.0, 0.0])
    with pytest.raises(ValueError, match="max_nodes is 0"):
        DynamicTreeDrafter(ScriptedHeads(2, [1, 2]), 0)


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(1, 14))
def test_ordering_keeps_parents(pointers, limit):
    """Random trees, each node as likely as its parent or half: after ordering, every kept node has its own parent."""
    parent = [-1] + [pointer % (i + 1) for i, pointer in enumerate(pointers)]
    probability = [1.0]
    for i, pointer in enumerate(pointers):
        probability.append(probability[parent[i + 1]] * (1.0 if pointer % 2 else 0.5))
    tokens = torch.arange(len(parent))[None]
    ordered, order = by_probability(tokens, torch.tensor([parent]), torch.tensor([probability]), limit)
    assert ordered.num_nodes == min(limit, len(parent)) and ordered.tokens.tolist() == order.tolist()
    assert ordered.probability[0].tolist() == sorted(probability, reverse=True)[:limit]
    for token, place in zip(ordered.tokens[0].tolist(), ordered.parent[0].tolist(), strict=True):
        assert (place == -1) if token == 0 else ordered.tokens[0, place] == parent[token]


@given(st.lists(st.lists(st.integers(0, 100), min_size=6, max_size=6), min_size=1, max_size=3))
def test_masks_and_depths_follow_from_parents(rows):
    parents = [[-1] + [pointer % (i + 1) for i, pointer in enumerate(row)] for row in rows]
    draft = Draft.of_parents(torch.zeros(len(rows), 7, dtype=torch.int64), torch.tensor(parents))
    for row, parent in enumerate(parents):
        for node in range(7):
            seen, at = {node}, node
            while (at := parent[at]) >= 0:
                seen.add(at)
            assert set(draft.mask[row, node].nonzero().flatten().tolist()) == seen
            assert draft.depth[row, node] == len(seen) - 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 3))
def test_a_static_tree_asks_heads_for_each_prefix(seed, batch):
    """A node (r0, .., rd) holds the guess of rank rd below its own parents, not below the best ones."""
    heads = ScriptedHeads(3, [2, 4, 6, 8], design="scripted", seed=seed)
    tree = DraftTree.from_paths([(0,), (2,), (0, 1), (2, 0), (2, 3), (2, 3, 1), (2, 0, 2), (0, 1, 0)])
    tokens = StaticTreeDrafter(heads, tree).propose(torch.arange(batch), torch.zeros(batch, 4)).tokens
    for row in range(batch):
        prefixes = {(): [row]}
        for node, path in enumerate(tree.node_paths, start=1):
            prefix = prefixes[path[:-1]]
            best = heads._row(len(path) - 1, 0.0, prefix).argsort(descending=True)
            assert tokens[row, node] == heads.ids[best[path[-1]]]
            prefixes[path] = [*prefix, int(tokens[row, node])]


def test_a_static_tree_as_candidates_is_ordered_by_its_probabilities():
    heads = ScriptedHeads(2, [2, 4, 6])
    tree = DraftTree.from_paths([(0,), (1,), (0, 0), (0, 1)])
    drafter = StaticTreeDrafter(heads, tree, [0.6, 0.2, 0.4, 0.1])
    candidates = drafter.candidates(torch.tensor([9]), torch.zeros(1, 4))
    assert candidates.probability[0].tolist() == pytest.approx([1.0, 0.6, 0.4, 0.2, 0.1])
    tokens = drafter.propose(torch.tensor([9]), torch.zeros(1, 4)).tokens[0]
    assert candidates.tokens[0].tolist() == tokens[[0, 1, 3, 2, 4]].tolist()
