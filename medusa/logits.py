"""From the base's logits to a token: penalties, truncations, a draw. Row by row the same as Transformers' processors.

All take and give float32 scores [n, V]; an excluded token's score is -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import SamplingParams

NO_TOKEN_POSSIBLE = "sampling: no token is possible; a logits processor excluded all of them, or made NaN"
FIRST_LOOK = 1024  # a full sort of the vocabulary is slow; this many tokens nearly always hold the nucleus


def penalise(scores: Tensor, context: Tensor, output: Tensor, params: SamplingParams) -> Tensor:
    """context: int64 [n, T], prompt and output. output: int64 [n, T']. Ids of V or more are passed over."""
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        seen = count_tokens(context, scores.shape[-1]) > 0
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if params.presence_penalty or params.frequency_penalty:
        counts = count_tokens(output, scores.shape[-1])
        scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return scores


def count_tokens(ids: Tensor, vocab_size: int) -> Tensor:
    """int64 [n, T] -> float32 [n, V]: how often each token occurs."""
    counts = torch.zeros(len(ids), vocab_size + 1, device=ids.device)
    ids = ids.clamp(max=vocab_size)
    return counts.scatter_add_(1, ids, torch.ones((), device=ids.device).expand(ids.shape))[:, :-1]


def warp(scores: Tensor, params: SamplingParams) -> Tensor:
    """Temperature (above 0), top-k, top-p, min-p, in this order."""
    if params.temperature != 1:
        scores = scores / params.temperature
    if params.top_k:
        scores = _exclude(scores, scores < scores.topk(min(int(params.top_k), scores.shape[-1])).values[:, -1:])
    if params.top_p < 1:
        scores = _exclude(scores, ~nucleus(scores, params.top_p))
    if params.min_p:
        probabilities = scores.softmax(dim=-1)
        scores = _exclude(scores, probabilities < params.min_p * probabilities.amax(dim=-1, keepdim=True))
    return scores


def _exclude(scores: Tensor, excluded: Tensor) -> Tensor:
    return scores.masked_fill(excluded, -torch.inf)


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """bool [n, V]: the smallest set of likeliest tokens that reaches `top_p`. Of tokens equally likely at its edge
    those with higher ids are in it (in Transformers whichever its sort puts last)."""
    best = scores.topk(min(FIRST_LOOK, scores.shape[-1]), dim=-1).values
    total = scores.logsumexp(dim=-1, keepdim=True)
    edge, num_at_edge, reached = _edge(best, total, top_p)
    missed = (~reached).nonzero().flatten()
    if len(missed) and best.shape[-1] < scores.shape[-1]:
        whole = scores[missed].sort(dim=-1, descending=True).values
        edge[missed], num_at_edge[missed], _ = _edge(whole, total[missed], top_p)
    at_edge = scores == edge
    kept = scores >= edge
    cut = (at_edge.sum(dim=-1) > num_at_edge).nonzero().flatten()
    if len(cut):
        place = at_edge[cut].flip(-1).cumsum(dim=-1).flip(-1)  # 1 for the highest id at the edge
        kept[cut] &= ~at_edge[cut] | (place <= num_at_edge[cut, None])
    return kept


def _edge(best: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """best [n, m]: scores in falling order; total [n, 1]: logsumexp of all. -> the lowest score in the nucleus [n, 1],
    how many tokens in it have just that score [n], whether `best` reaches top_p [n]."""
    probabilities = (best - total).exp().double()
    cumulative = probabilities.cumsum(dim=-1)
    size = (cumulative - probabilities < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    edge = best.gather(-1, size - 1)
    inside = torch.arange(best.shape[-1], device=best.device) < size
    return edge, ((best == edge) & inside).sum(dim=-1), cumulative[:, -1] >= top_p


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row by inverting the cumulative distribution, in the order of token ids, so that scores that differ
    by rounding give the same token for nearly every uniform. uniforms: float64 [n], in [0, 1). -> int64 [n].

    Raises ValueError where no token is possible.
    """
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not bool((total > 0).all()):
        raise ValueError(NO_TOKEN_POSSIBLE)
    # Strictly below the total, so that the last token found has a probability.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]
