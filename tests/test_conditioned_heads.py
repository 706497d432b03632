"""Heads that see the drafted prefix: what they look at, and what they say before training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from medusa.conditioned_heads import DESIGNS, make_heads
from medusa.config import HeadsConfig
from medusa.draft import Draft
from medusa.heads_drafter import StaticTreeDrafter
from medusa.tree import DraftTree

D, V, DRAFT, K = 8, 30, 12, 3


def make(design, num_layers=2, is_random=True):
    torch.manual_seed(0)
    config = HeadsConfig(K, num_layers, D, V, "shared", DRAFT, design, 4 if design == "markov" else None)
    heads = make_heads(config, torch.arange(0, 2 * DRAFT, 2))
    heads.init_from_base(torch.randn(V, D), torch.randn(V, D))
    if is_random:
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return heads.requires_grad_(False)


@pytest.mark.parametrize("design", DESIGNS)
def test_untrained_heads_say_what_the_lm_head_says(design):
    heads, hidden = make(design, is_random=False), torch.randn(5, D)
    expected = hidden @ heads.lm_head_weight.T
    for logits in heads(hidden, torch.randint(0, V, (5, K))):
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("design, looks_at", [("medusa", 0), ("markov", 1), ("hydra", K)])
def test_a_head_looks_at_as_much_of_the_prefix_as_its_design_says(design, looks_at):
    heads, hidden, prefix = make(design), torch.randn(1, D), torch.randint(0, V, (1, K))
    for head in range(K):
        before = heads.logits(head, hidden, prefix)
        seen = []
        for place in range(K):
            other = prefix.clone()
            other[0, place] = (other[0, place] + 1) % V
            seen.append(not torch.equal(heads.logits(head, hidden, other), before))
        first = max(0, head + 1 - looks_at)
        assert seen == [first <= place <= head for place in range(K)]


def test_hydra_is_its_formula():
    heads, hidden, prefix = make("hydra"), torch.randn(6, D), torch.randint(0, V, (6, K))
    parts = [hidden, heads.embeddings[prefix[:, 0]], heads.embeddings[prefix[:, 1]]]
    seen = torch.cat([x / x.pow(2).mean(-1, keepdim=True).sqrt() for x in parts], dim=-1)
    x = hidden + F.silu(heads.inputs[1](seen))
    [block] = heads.blocks[1]
    x = x + F.silu(block.linear(x))
    torch.testing.assert_close(heads.logits(1, hidden, prefix), x @ heads.lm_head_weight.T, rtol=1e-4, atol=1e-4)


def test_the_markov_bias_is_its_formula():
    heads, hidden, prefix = make("markov"), torch.randn(6, D), torch.randint(0, V, (6, K))
    bias = heads.parents.weight[prefix[:, 1]] @ heads.bias.weight.T
    torch.testing.assert_close(heads.logits(1, hidden, prefix), heads.project(heads.blocks[1](hidden), 1) + bias)


@pytest.mark.parametrize("design", DESIGNS)
def test_terms_add_up_to_the_logits(design):
    heads, hidden, prefix = make(design), torch.randn(6, D), torch.randint(0, V, (6, K))
    total = sum(term.features @ term.weight.T for term in heads.terms(2, hidden, prefix))
    torch.testing.assert_close(total, heads.logits(2, hidden, prefix))


@pytest.mark.parametrize("design", DESIGNS)
def test_each_node_of_a_tree_is_guessed_from_its_own_path(design):
    heads, tree = make(design), DraftTree.from_paths([(0,), (1,), (3,), (0, 0), (1, 2), (3, 0), (3, 1), (3, 1, 1)])
    root, hidden = torch.tensor([4, 7]), torch.randn(2, D)
    draft = StaticTreeDrafter(heads, tree).propose(root, hidden)
    assert isinstance(draft, Draft)
    for row in range(2):
        tokens = {(): int(root[row])}
        for path in tree.node_paths:
            prefix = torch.tensor([[tokens[path[:d]] for d in range(len(path))]])
            best = heads.logits(len(path) - 1, hidden[row : row + 1], prefix)[0].argsort(descending=True)
            tokens[path] = int(heads.draft_to_base(best[path[-1]]))
        assert draft.tokens[row].tolist() == [tokens[path] for path in [(), *tree.node_paths]]


def test_hydra_needs_embeddings_as_wide_as_the_states():
    with pytest.raises(ValueError, match="input embeddings of 5 numbers, expected 8.*heads.design=medusa"):
        make("hydra").attach_base(torch.randn(V, D), torch.randn(V, 5))


@pytest.mark.parametrize("design, rank", [("markov", None), ("markov", 0), ("hydra", 4), ("eagle", None)])
def test_a_design_that_makes_no_heads_is_refused(design, rank):
    with pytest.raises(ValueError, match="markov_rank is|design is"):
        HeadsConfig(K, 1, D, V, design=design, markov_rank=rank)


def test_fused_states_are_their_formula_and_begin_as_the_last_one():
    torch.manual_seed(0)
    heads = make_heads(HeadsConfig(K, 1, D, V, design="hydra", fused_layers=[2, 5]))
    states = torch.randn(4, 3 * D)
    assert torch.equal(heads.fuse(states), states[:, :D])
    torch.nn.init.normal_(heads.fusion.weight)
    parts = [x / x.pow(2).mean(-1, keepdim=True).sqrt() for x in states[:, D:].split(D, dim=1)]
    expected = states[:, :D] + torch.cat(parts, dim=1) @ heads.fusion.weight.T
    torch.testing.assert_close(heads.fuse(states), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="other fused layers"):
        heads.fuse(states[:, :D])


@pytest.mark.parametrize("layers", [[0], [1.5], "25", [True]])
def test_fused_layers_are_numbers_from_one(layers):
    with pytest.raises(ValueError, match="fused_layers is .*, expected numbers of layers, the first being 1"):
        HeadsConfig(K, 1, D, V, fused_layers=layers)
