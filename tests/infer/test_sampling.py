"""Drawing from the nucleus: the right distribution, and a wrong rule that the same test finds out."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from medusa.infer import sampling
from medusa.infer.sampling import top_p_sampler

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -0.5, -1.0, -3.0])
DRAWS = 20_000


def draw(logits, **options):
    choose = top_p_sampler(torch.Generator().manual_seed(1), **options)
    return choose(logits.expand(DRAWS, -1))


def nucleus(logits, temperature, top_p):
    """By sorting, as the definition has it: the smallest set of likeliest tokens that reaches top_p."""
    probabilities = (logits / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept, total = [], 0.0
    for token in order.tolist():
        if total >= top_p:
            break
        kept.append(token)
        total += probabilities[token].item()
    expected = torch.zeros_like(probabilities)
    expected[kept] = probabilities[kept]
    return expected / expected.sum()


def p_value(tokens, expected):
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    share = expected[expected > 0].double()
    return chisquare(counts[expected > 0], share / share.sum() * counts.sum()).pvalue


@pytest.mark.parametrize("temperature, top_p", [(1.0, 0.95), (1.0, 1.0), (0.7, 0.8), (1.5, 0.5)])
@pytest.mark.parametrize("first_look", [1024, 3])
def test_tokens_come_as_often_as_they_should(monkeypatch, temperature, top_p, first_look):
    monkeypatch.setattr(sampling, "FIRST_LOOK", first_look)
    tokens = draw(LOGITS, temperature=temperature, top_p=top_p)
    assert p_value(tokens, nucleus(LOGITS, temperature, top_p)) > 1e-3


def test_the_test_would_notice_another_temperature():
    tokens = draw(LOGITS, temperature=1.1, top_p=1.0)
    assert p_value(tokens, nucleus(LOGITS, 1.0, 1.0)) < 1e-6


def test_a_seed_gives_the_same_tokens_and_shapes_are_kept():
    logits = torch.randn(2, 3, 50)
    first, second = (top_p_sampler(torch.Generator().manual_seed(5))(logits) for _ in range(2))
    assert torch.equal(first, second) and first.shape == (2, 3)
