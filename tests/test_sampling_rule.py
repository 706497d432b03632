"""Which nodes are walked, and typical acceptance, on cases written by hand and against a slow reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.acceptance import GREEDY
from medusa.draft import NO_TOKEN, Draft
from medusa.row_sampler import RowSampler
from medusa.sampling import GREEDY_SAMPLING, SamplingParams, Typical
from medusa.sampling_rule import DraftedPaths, SamplingRule, rule_for, walk
from medusa.tree import DraftTree

TREE = DraftTree.cartesian([2, 2])  # nodes: root, 0, 1, 00, 01, 10, 11
TOKENS = [9, 20, 21, 30, 31, 32, 33]


def test_a_walk_follows_children_and_looks_nowhere_else():
    choices = torch.full((3, 7), 77)
    choices[0, :2] = torch.tensor([20, 31])  # down to node 4
    choices[1, 0] = 21  # to node 2
    visited = []

    def choose(rows, nodes):
        visited.append(list(zip(rows.tolist(), nodes.tolist(), strict=True)))
        return choices[rows, nodes]

    draft = Draft.of_tree(TREE, torch.tensor([TOKENS] * 3))
    last, chosen = walk(draft, torch.arange(3), choose)
    assert last.tolist() == [4, 2, 0] and chosen.tolist() == [77, 77, 77]
    assert visited == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 2)], [(0, 4)]]


def test_drafted_paths_leave_the_root_out():
    paths = DraftedPaths(Draft.of_tree(TREE, torch.tensor([TOKENS])))
    assert [paths(0, node) for node in (0, 1, 6)] == [[], [20], [21, 33]]


def sampler(params, typical=None, prompt=(1,), output=(9,)):
    return RowSampler(params, list(prompt), list(output), typical)


def test_only_greedy_rows_take_the_fast_way():
    greedy, penalised = sampler(GREEDY_SAMPLING), sampler(SamplingParams(0.0, presence_penalty=1.0))
    assert rule_for([greedy, greedy]) is GREEDY
    assert isinstance(rule_for([greedy, penalised]), SamplingRule)
    assert isinstance(rule_for([sampler(SamplingParams())]), SamplingRule)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_greedy_rows_of_a_mixed_batch_are_accepted_as_ever(seed, batch):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, TREE.num_nodes, 3, generator=generator)
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), TREE.rank[1:].expand(batch, -1)], dim=1)
    draft = Draft.of_tree(TREE, tokens)
    expected = GREEDY.accept(draft, logits)
    mixed = SamplingRule([sampler(GREEDY_SAMPLING)] * batch + [sampler(SamplingParams(1.0, seed=1))])
    again = torch.arange(batch + 1) % batch
    result = mixed.accept(Draft.of_tree(TREE, tokens[again]), logits[again])
    for row in range(batch):
        count = int(result.counts[row])
        assert count == expected.counts[row] and result.bonus[row] == expected.bonus[row]
        assert result.nodes[row, :count].tolist() == expected.nodes[row, :count].tolist()


def accept_typical(probabilities, tokens=(0, 1, 2, 1, 2, 1, 2), typical=None, **settings):
    """probabilities [7, V], one distribution a node of TREE -> accepted nodes, bonus."""
    rule = SamplingRule([sampler(SamplingParams(1.0, **settings), typical or Typical(0.3, 0.5))])
    draft = Draft.of_tree(TREE, torch.tensor([tokens]))
    result = rule.accept(draft, torch.tensor(probabilities).log()[None])
    return result.nodes[0, : result.counts[0]].tolist(), int(result.bonus)


SURE, FLAT, SPLIT = [0.9, 0.04, 0.06], [0.34, 0.33, 0.33], [0.0, 0.65, 0.35]
# exp(-entropy): 0.68, 0.33, 0.52; thresholds with epsilon 0.3 and delta 0.5: 0.3, 0.167, 0.262


def test_typical_keeps_the_longest_plausible_path():
    #        root   1     2     11    12    21    22
    nodes = [FLAT, SURE, FLAT, SURE, SURE, SURE, SPLIT]
    assert accept_typical(nodes) == ([0, 2, 5], 0)  # 21 and 22 are equally likely: the first
    assert accept_typical([FLAT, SURE, SPLIT, SURE, SURE, SURE, SPLIT]) == ([0, 2, 5], 0)
    assert accept_typical([FLAT, SURE, SPLIT[::-1], SURE, SURE, SURE, SPLIT]) == ([0, 2, 5], 0)
    assert accept_typical([FLAT, SURE, [0.1, 0.3, 0.6], SURE, SURE, SURE, SPLIT]) == ([0, 2, 6], 1)  # the likelier
    by_product = [[0.2, 0.5, 0.3], [0.45, 0.5, 0.05], [0.4, 0.6, 0.0], *[SURE] * 4]  # 0.5 * 0.5 against 0.3 * 0.6
    assert accept_typical(by_product, typical=Typical(0.25, 1.0)) == ([0, 1, 3], 0)
    assert accept_typical([FLAT] + [SURE] * 6) == ([0, 1], 0)  # nothing plausible below either
    assert accept_typical([SURE] * 7) == ([0], 0)


def test_typical_thresholds_are_the_papers():
    """p > min(epsilon, delta exp(-H)): SPLIT's second token, 0.35, against either bound, just above and just below."""
    entropy = -sum(p * torch.tensor(p).log() for p in (0.65, 0.35))
    nodes = [SPLIT] + [SURE] * 6
    only_second = (0, 2, 0, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN)
    for epsilon, delta, kept in [
        (0.34, 1.0, True),
        (0.36, 1.0, False),
        (1.0, 0.34 * float(entropy.exp()), True),
        (1.0, 0.36 * float(entropy.exp()), False),
    ]:
        nodes_kept, _ = accept_typical(nodes, only_second, Typical(epsilon, delta))
        assert nodes_kept == ([0, 1] if kept else [0]), (epsilon, delta)


def test_typical_sees_temperature_and_truncation():
    nodes, only_second = [SPLIT] + [SURE] * 6, (0, 2, 0, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN)
    assert accept_typical(nodes, only_second, Typical(0.3, 1.0)) == ([0, 1], 0)
    assert accept_typical(nodes, only_second, Typical(0.3, 1.0), top_k=1) == ([0], 1)


def test_typical_beside_other_rules_and_penalties():
    """A penalty on the drafted token below it; the neighbours are walked as if alone."""
    typical = sampler(SamplingParams(1.0, presence_penalty=50.0), Typical(0.3, 0.5), output=[5])
    rule = SamplingRule([sampler(GREEDY_SAMPLING), typical])
    draft = Draft.of_tree(TREE, torch.tensor([[0, 1, 2, 1, 2, 1, 2]] * 2))
    logits = torch.tensor([[0.01, 0.98, 0.01]] * 7).log().expand(2, -1, -1)
    result = rule.accept(draft, logits)
    assert result.nodes[0, : result.counts[0]].tolist() == [0, 1, 3] and result.bonus[0] == 1
    # Token 1 is said; below it only 0 and 2 are left, equally likely: 2 is accepted, then 0 is all there is.
    assert result.nodes[1, : result.counts[1]].tolist() == [0, 1, 4] and result.bonus[1] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_token_comes_from_the_prompts_own_scores(temperature):
    """A repetition penalty that forbids what the prompt says; typical takes the best of the rest."""
    params = SamplingParams(temperature, repetition_penalty=1000.0, top_k=1 if temperature else 0, seed=3)
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    assert SamplingRule([sampler(params, prompt=[0], output=[])]).first(logits, 0).tolist() == [1]
    if temperature:
        assert SamplingRule([sampler(params, Typical(), [0, 1], [])]).first(logits, 0).tolist() == [2]
