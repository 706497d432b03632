"""Requests in, pieces out: rows of one batch that join when their prompts are computed and leave when they are done.

A finished row's place is taken by the next waiting request at once, so a batch stays full while there is work. Prompts
are computed in chunks between the steps, so that nobody's next token waits for more than one chunk and one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from medusa.base_model import BaseModel
from medusa.drafter import Drafter
from medusa.sampling_rule import rule_for

from .admission import Admission, Admissions
from .decode import DecodeState, decode_step
from .logprobs import token_logprobs
from .prefix_cache import PrefixCache
from .request import Piece, Request

PREFILL_CHUNK = 256  # tokens
SMALLEST_CHUNK = 32  # what a forward of fewer tokens is taken to cost


class Engine:
    """Runs requests on `base_model`, at most `max_rows` at a time, drafting with `drafter`.

    capacity: cache slots a row, in tokens; a request that does not fit (prompt + max_new_tokens, and the model's own
    context length) is refused by `check` with the numbers, before anything is computed. prefill_chunk: prompt tokens
    a step, of one prompt or several short ones; see `Admissions` for their order. prefix_cache_bytes: memory for keys
    and values of earlier requests, see `PrefixCache`; 0 keeps none.
    """

    def __init__(
        self,
        base_model: BaseModel,
        drafter: Drafter,
        *,
        max_rows: int,
        capacity: int,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int = 0,
    ) -> None:
        self.base_model, self.max_rows, self.capacity = base_model, max_rows, capacity
        self.prefill_chunk = prefill_chunk
        self.prefix_cache = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
        num_rows = max_rows + 1 if max_rows > 1 else 1  # with a spare one, see `Admissions`
        self.state = DecodeState.empty(base_model, drafter, max_rows=num_rows, capacity=capacity)
        self.waiting: deque[Request] = deque()
        self.admissions = Admissions(base_model, self.state, self.prefix_cache)
        self.running: list[Request] = []  # in the order of the live rows

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that does not fit. Touches nothing: may be called from any thread."""
        check_length(self.base_model, request)
        if request.capacity > self.capacity:
            raise ValueError(
                f"request: {len(request.prompt_ids)} prompt tokens and {request.max_new_tokens} new ones need "
                f"{request.capacity}, the engine's cache holds {self.capacity} a row; ask for less"
            )

    def submit(self, request: Request) -> None:
        self.check(request)
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.admissions or self.waiting)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Piece]]:
        """Drop who is cancelled or overdue, decode one step, admit who fits, compute a chunk of prompts.

        Returns what requests gained, each at most one piece: a prompt that became whole gave its first token and is
        decoded from the next step on. One that has ended, `is_finished`, comes a last time, perhaps with nothing.
        """
        pieces = self._abort_overdue()
        if self.running:
            pieces += self._decode()
        while self.waiting and len(self.running) + len(self.admissions) < self.max_rows:
            request = self.waiting.popleft()
            request.count_queued()
            self.admissions.admit(request)
        return pieces + self._prefill()

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Piece]]:
        """Submit all and step until nothing is left. Raises the first error of a request."""
        for request in requests:
            self.submit(request)
        while self.has_work:
            for request, piece in self.step():
                if request.error is not None:
                    raise request.error
                yield request, piece

    def _abort_overdue(self) -> list[tuple[Request, Piece]]:
        overdue = [r for r in (*self.waiting, *self.admissions.requests, *self.running) if r.is_overdue]
        if not overdue:
            return []
        pieces = [(request, request.abort()) for request in overdue]
        self.waiting = deque(request for request in self.waiting if not request.is_finished)
        self._drop_finished()
        return pieces

    def _prefill(self) -> list[tuple[Request, Piece]]:
        budget, pieces = self.prefill_chunk, []
        while self.admissions and (budget == self.prefill_chunk or budget >= SMALLEST_CHUNK):
            admission = self.admissions.next()
            before = admission.num_done
            hidden = self.admissions.advance(admission, budget)
            budget -= max(admission.num_done - before, SMALLEST_CHUNK)
            if not admission.num_left:
                pieces.append((admission.request, self._join(admission, hidden)))
        self._drop_finished()
        return pieces

    def _join(self, admission: Admission, hidden: Tensor) -> Piece:
        """The prompt is whole. hidden: [1, D], its last state."""
        request, row = admission.request, self.state.num_rows
        rule, logits = rule_for([request.sampler]), self.base_model.logits(hidden)
        root = rule.first(logits, 0)
        self.admissions.make_live(admission)
        self.state.append(root, hidden)
        self.running.append(request)
        self._remember(row)
        num_top = request.num_logprobs
        logprobs = None if num_top is None else token_logprobs(logits, root.tolist(), num_top)
        return _emit(request, root.tolist(), 0, logprobs, rule.failures.get(0))

    def _decode(self) -> list[tuple[Request, Piece]]:
        """Every row is decoded as its request asks, whoever the others are."""
        requests = self.running
        rule = rule_for([request.sampler for request in requests])
        muted = [row for row, request in enumerate(requests) if not request.speculate]
        scored = {row: r.num_logprobs for row, r in enumerate(requests) if r.num_logprobs is not None}
        step = decode_step(self.base_model, self.state, rule, muted=muted, scored=scored)
        gained = zip(requests, step.tokens.tolist(), step.counts.tolist(), step.num_drafted.tolist(), strict=True)
        pieces = [
            (request, _emit(request, tokens[:count], num_drafted, step.logprobs.get(row), rule.failures.get(row)))
            for row, (request, tokens, count, num_drafted) in enumerate(gained)
        ]
        self._drop_finished()
        return pieces

    def _drop_finished(self) -> None:
        for request in self.admissions.requests:
            if request.is_finished:
                self.admissions.drop(request)
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row].is_finished:
                self._remember(row)
                self.state.remove(row)
                self.running[row] = self.running[-1]
                self.running.pop()

    def _remember(self, row: int) -> None:
        """Of a live row what is certain: nothing that its request has dropped."""
        if self.prefix_cache is not None:
            request = self.running[row]
            num_tokens = int(self.state.cache.lengths[row])
            known = (request.prompt_ids + request.token_ids)[:num_tokens]
            self.prefix_cache.store(self.state.cache, row, known)


def _emit(request: Request, *gained: Any) -> Piece:
    """A request whose tokens cannot be made text ends alone. gained: as for `Request.emit`."""
    try:
        return request.emit(*gained)
    except Exception as error:  # of the request's tokenizer
        request.fail(error)
        return Piece("", [], 0)


def check_length(base_model: BaseModel, request: Request) -> None:
    """Raises ValueError when prompt and answer together pass the model's context length."""
    if request.capacity > base_model.max_positions:
        prompt = len(request.prompt_ids)
        raise ValueError(
            f"request: {prompt} prompt tokens and {request.max_new_tokens} new ones make {request.capacity}, more than "
            f"the {base_model.max_positions} of the model's context; lower max_new_tokens to "
            f"{max(0, base_model.max_positions - prompt)} or shorten the prompt"
        )
