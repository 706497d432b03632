"""A tie of sampled answers is told from a fault by the uniform number that both used."""

from __future__ import annotations

import pytest
import torch

from medusa.infer.ties import TIE_GAP, gap_at, sampled_gap
from medusa.row_sampler import RowSampler
from medusa.sampling import SamplingParams

LOGITS = torch.tensor([[0.2, 0.1, 0.4, 0.3]]).log()  # intervals end at 0.2, 0.3, 0.7, 1.0


@pytest.mark.parametrize(
    "uniform, tokens, gap",
    [
        (0.2004, (0, 1), 0.0004),  # just above the edge of both
        (0.1996, (0, 1), 0.0004),
        (0.25, (0, 1), 0.05),  # in the middle of 1
        (0.3, (0, 2), 0.1),  # not neighbours
    ],
)
def test_the_gap_is_the_distance_to_the_farther_interval(uniform, tokens, gap):
    sampler = RowSampler(SamplingParams(1.0), [1], [])
    assert sampled_gap(sampler, LOGITS, uniform, tokens) == pytest.approx(gap, abs=1e-6)


def test_a_nucleus_whose_edge_is_numerical_is_a_tie():
    """0.7 is reached by two tokens or, rounded otherwise, by three: then all intervals are others."""
    sampler = RowSampler(SamplingParams(1.0, top_p=0.7), [1], [])
    assert sampled_gap(sampler, LOGITS, 0.1, (0, 2)) < TIE_GAP
    assert sampled_gap(sampler, LOGITS, 0.1, (1, 2)) == 1.0  # 1 is in neither nucleus


class ScriptedStock:
    def next_logits(self, token_ids):
        self.asked = token_ids
        return LOGITS

    def top_two_gap(self, token_ids):
        self.asked = token_ids
        return 0.125


def test_the_place_and_its_number_are_those_of_the_first_difference():
    stock, params = ScriptedStock(), SamplingParams(1.0, seed=6)
    sampler = RowSampler(params, [], [])
    uniform = [sampler.uniform() for _ in range(3)][-1]
    right = int((LOGITS.exp().cumsum(-1) > uniform).int().argmax())
    wrong = (right + 1) % 4
    gap = gap_at(stock, params, [8, 9], [5, 6, right], [5, 6, wrong])
    assert stock.asked == [8, 9, 5, 6]
    assert gap == pytest.approx(sampled_gap(sampler, LOGITS, uniform, (right, wrong))) and gap > 0
    assert gap_at(stock, SamplingParams(0.0), [8, 9], [5, 6], [5, 7]) == 0.125 and stock.asked == [8, 9, 5]
    assert gap_at(stock, params, [8, 9], [5, 6], [5]) == 1.0
