"""Sampling the base's own tokens, for prompts that the model writes itself (lossless tree sampling is not here yet)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FIRST_LOOK = 1024  # a full sort of the vocabulary is slow; this many tokens nearly always hold the nucleus


def top_p_sampler(
    generator: torch.Generator, *, temperature: float = 1.0, top_p: float = 0.95
) -> Callable[[Tensor], Tensor]:
    """A choice that draws from the smallest set of tokens whose probabilities reach `top_p`."""

    def choose(logits: Tensor) -> Tensor:
        probabilities = (logits.float() / temperature).softmax(dim=-1)
        flat = probabilities.view(-1, probabilities.shape[-1])
        look = min(FIRST_LOOK, flat.shape[-1])
        best, tokens = flat.topk(look, dim=-1)
        drawn = _draw(best, tokens, top_p, generator)
        flat_tail = (best.sum(dim=-1) < top_p).nonzero().flatten()
        if len(flat_tail):
            best, tokens = flat[flat_tail].sort(dim=-1, descending=True)
            drawn[flat_tail] = _draw(best, tokens, top_p, generator)
        return drawn.view(probabilities.shape[:-1])

    return choose


def _draw(best: Tensor, tokens: Tensor, top_p: float, generator: torch.Generator) -> Tensor:
    """best [n, m]: probabilities in falling order; tokens [n, m]. One token a row, int64 [n]."""
    before = best.cumsum(dim=-1) - best
    nucleus = best.masked_fill(before >= top_p, 0.0)
    # Inverse of the cumulative distribution: much faster than multinomial over many columns.
    cumulative = nucleus.cumsum(dim=-1)
    draw = torch.rand(len(best), 1, generator=generator, device=best.device) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, draw, right=True).clamp_(max=best.shape[-1] - 1)
    return tokens.gather(-1, index)[:, 0]
