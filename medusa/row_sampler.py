"""What a row needs to choose its tokens, and the scores of many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from .acceptance import Failure
from .logits import NO_TOKEN_POSSIBLE, draw, penalise, warp
from .sampling import SamplingParams, Typical

UNIFORMS_AT_ONCE = 32

# (row, node) -> the drafted tokens on the way to the node, the root left out
DraftedPath = Callable[[int, int], list[int]]


class RowSampler:
    """One request's settings, its randomness, and what was said so far.

    prompt_ids and token_ids: the request's own lists; the latter grows as tokens are emitted, the root of the next
    step included. One uniform number is used for every emitted token, so that the n-th token of a seed depends on the
    tokens before it and on nothing else.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: list[int], token_ids: list[int], typical: Typical | None = None
    ) -> None:
        self.params, self.typical = params, typical
        self.prompt_ids, self.token_ids = prompt_ids, token_ids
        self.group = params.without_seed()
        self._uniforms: list[float] = []
        self._generator: torch.Generator | None = None

    @property
    def is_plain_greedy(self) -> bool:
        return self.typical is None and self.params.is_plain_greedy

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        if not self._uniforms:
            numbers = torch.rand(UNIFORMS_AT_ONCE, dtype=torch.float64, generator=self._seeded())
            self._uniforms = numbers.flip(0).tolist()
        return self._uniforms.pop()

    def _seeded(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator()
            if self.params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.params.seed)
        return self._generator


class RowSamplers:
    """The samplers of the rows `0..B-1`; rows with the same settings are worked on together.

    failures: by row, what its processors raised, or that its settings left no token. Such a row goes on with scores
    that mean nothing, so that the others, whose random numbers may have been drawn already, are not disturbed.
    """

    def __init__(self, samplers: Sequence[RowSampler]) -> None:
        self.samplers = samplers
        self.failures: dict[int, Failure] = {}
        index: dict[SamplingParams, int] = {}
        self._group = torch.tensor([index.setdefault(sampler.group, len(index)) for sampler in samplers])
        self._params = list(index)
        self._is_drawn = torch.tensor([params.temperature > 0 for params in index])[self._group]

    def scores(self, rows: Tensor, nodes: Tensor, logits: Tensor, drafted: DraftedPath) -> Tensor:
        """logits [n, V] at nodes `nodes` of rows `rows`, int64 [n] -> float32 [n, V], penalties and processors applied
        to what each node's own path has said, then temperature and truncations (not where it is 0)."""
        if len(self._params) == 1:
            scores = self._scores_of_group(self._params[0], rows, nodes, logits, drafted)
            return self._possible(rows, nodes, scores, drafted)
        scores = torch.empty(logits.shape, device=logits.device)
        group = self._group.to(rows.device)[rows]
        for number in group.unique().tolist():
            members = (group == number).nonzero().flatten()
            scores[members] = self._scores_of_group(
                self._params[number], rows[members], nodes[members], logits[members], drafted
            )
        return self._possible(rows, nodes, scores, drafted)

    def choose(self, rows: Tensor, scores: Tensor) -> Tensor:
        """One token a row, int64 [n]: the best where temperature is 0, else drawn."""
        is_drawn = self._is_drawn.to(rows.device)[rows]
        uniforms = [self.samplers[row].uniform() for row in rows[is_drawn].tolist()]
        on_device = torch.tensor(uniforms, dtype=torch.float64).to(scores.device)
        if len(uniforms) == len(rows):
            return draw(scores, on_device)
        tokens = scores.argmax(dim=-1)
        if uniforms:
            tokens[is_drawn] = draw(scores[is_drawn], on_device)
        return tokens

    def _scores_of_group(
        self, params: SamplingParams, rows: Tensor, nodes: Tensor, logits: Tensor, drafted: DraftedPath
    ) -> Tensor:
        scores = logits.float()
        if params.needs_context:
            scores = self._in_context(params, rows, nodes, scores, drafted)
        return warp(scores, params) if params.temperature > 0 else scores

    def _in_context(
        self, params: SamplingParams, rows: Tensor, nodes: Tensor, scores: Tensor, drafted: DraftedPath
    ) -> Tensor:
        samplers = [self.samplers[row] for row in rows.tolist()]
        paths = list(map(drafted, rows.tolist(), nodes.tolist()))
        outputs = [sampler.token_ids + path for sampler, path in zip(samplers, paths, strict=True)]
        contexts = [sampler.prompt_ids + output for sampler, output in zip(samplers, outputs, strict=True)]
        scores = penalise(scores, _padded(contexts, scores), _padded(outputs, scores), params)
        if not params.processors:
            return scores
        each = zip(rows.tolist(), map(len, paths), contexts, scores.split(1), strict=True)
        return torch.cat([self._processed(params, *of_one) for of_one in each])

    def _processed(self, params: SamplingParams, row: int, depth: int, context: list[int], scores: Tensor) -> Tensor:
        """scores: [1, V]."""
        if row in self.failures:
            return torch.zeros_like(scores)
        try:
            return _run_processors(params, context, scores)
        except Exception as error:  # a request's own code: whatever it raises is that request's failure alone
            self.failures[row] = Failure(depth, error)
            return torch.zeros_like(scores)

    def _possible(self, rows: Tensor, nodes: Tensor, scores: Tensor, drafted: DraftedPath) -> Tensor:
        """The same, but all alike where no token is possible, which is noted."""
        impossible = ~scores.amax(dim=-1).isfinite()
        if not bool(impossible.any()):
            return scores
        for row, node in zip(rows[impossible].tolist(), nodes[impossible].tolist(), strict=True):
            self.failures.setdefault(row, Failure(len(drafted(row, node)), ValueError(NO_TOKEN_POSSIBLE)))
        return scores.masked_fill(impossible[:, None], 0.0)


def _run_processors(params: SamplingParams, context: list[int], scores: Tensor) -> Tensor:
    ids = torch.tensor([context], device=scores.device)
    for processor in params.processors:
        processed = processor(ids, scores)
        if processed.shape != scores.shape:
            raise ValueError(
                f"logits processor {type(processor).__name__}: got scores of shape {tuple(processed.shape)} from it, "
                f"expected {tuple(scores.shape)}"
            )
        scores = processed.to(scores.dtype)
    return scores


def _padded(ids: list[list[int]], scores: Tensor) -> Tensor:
    """int64 [n, T], short lists filled up with V, which is no token."""
    length, fill = max(map(len, ids)), scores.shape[-1]
    flat = list(chain.from_iterable(row + [fill] * (length - len(row)) for row in ids))
    return torch.tensor(flat, dtype=torch.int64, device=scores.device).view(len(ids), length)
