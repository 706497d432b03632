"""Where two answers part: how near the choice was, by the stock model's own logits at that place.

Greedy: the difference of the two best logits. Sampled: both answers used the same uniform number, so it has to lie next
to the intervals of both tokens in the cumulative distribution; the gap is how far from the farther one. The edge of the
nucleus may itself be numerical, so a token's interval is looked at with top_p a little lower and higher too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.row_sampler import RowSampler, RowSamplers
from medusa.sampling import SamplingParams

from .methods import StockModel

TIE_GAP = 1e-3  # top-two logit gap, or probability, below which two float32 computations may choose differently
NUCLEUS_EDGE = 1e-4  # by which rounding may move the mass that top_p is compared with
NOWHERE = 1.0  # a token that could not have been drawn: farther than any


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Index of the first token that is not the same; the shorter length where one begins the other."""
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(reference)))


def gap_at(
    stock: StockModel, params: SamplingParams, prompt_ids: list[int], reference: list[int], tokens: list[int]
) -> float:
    """The gap where `tokens` leave `reference`; `params` with the seed that both were drawn with."""
    place = first_difference(tokens, reference)
    if params.temperature == 0:
        return stock.top_two_gap(prompt_ids + reference[:place])
    if place >= min(len(tokens), len(reference)):
        return NOWHERE
    logits = stock.next_logits(prompt_ids + reference[:place])
    sampler = RowSampler(params, prompt_ids, reference[:place])
    uniform = [sampler.uniform() for _ in range(place + 1)][-1]
    return sampled_gap(sampler, logits, uniform, (tokens[place], reference[place]))


def sampled_gap(sampler: RowSampler, logits: Tensor, uniform: float, tokens: Sequence[int]) -> float:
    """logits [1, V] -> how far `uniform` lies from the farther one of the intervals of `tokens`, in probability."""
    nearest = [NOWHERE] * len(tokens)
    for shift in (-NUCLEUS_EDGE, 0.0, NUCLEUS_EDGE):
        params = replace(sampler.params, top_p=min(1.0, max(NUCLEUS_EDGE, sampler.params.top_p + shift)))
        varied = RowSamplers([RowSampler(params, sampler.prompt_ids, sampler.token_ids)])
        row = torch.zeros(1, dtype=torch.int64, device=logits.device)
        probabilities = varied.scores(row, row, logits, lambda row, node: [])[0].double().softmax(dim=-1)
        above = probabilities.cumsum(dim=-1)
        for i, token in enumerate(tokens):
            high = float(above[token])
            low = high - float(probabilities[token])
            if high > low:
                nearest[i] = min(nearest[i], max(low - uniform, uniform - high, 0.0))
    return max(nearest)
