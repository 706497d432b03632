"""Requests in, pieces out: rows of one batch that join after a prefill and leave when they are done.

A finished row's place is taken by the next waiting request at once, so a batch stays full while there is work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from medusa.acceptance import AcceptanceRule
from medusa.base_model import BaseModel
from medusa.drafter import Drafter
from medusa.sampling_rule import rule_for

from .decode import DecodeState, decode_step, prefill
from .request import Piece, Request


class Engine:
    """Runs requests on `base_model`, at most `max_rows` at a time, drafting with `drafter`.

    capacity: cache slots a row, in tokens; a request that does not fit (prompt + max_new_tokens, and the model's own
    context length) is refused by `check` with the numbers, before anything is computed.
    """

    def __init__(self, base_model: BaseModel, drafter: Drafter, *, max_rows: int, capacity: int) -> None:
        self.base_model, self.max_rows, self.capacity = base_model, max_rows, capacity
        self.state = DecodeState.empty(base_model, drafter, max_rows=max_rows, capacity=capacity)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    def submit(self, request: Request) -> None:
        check_length(self.base_model, request)
        if request.capacity > self.capacity:
            raise ValueError(
                f"request: {len(request.prompt_ids)} prompt tokens and {request.max_new_tokens} new ones need "
                f"{request.capacity}, the engine's cache holds {self.capacity} a row; ask for less"
            )
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def step(self) -> list[tuple[Request, Piece]]:
        """Admit what fits, then decode one step. Returns what each request gained."""
        pieces = [self._admit(self.waiting.popleft()) for _ in range(self._num_free_rows())]
        if self.running:
            pieces += self._decode()
        return pieces

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Piece]]:
        """Submit all and step until nothing is left."""
        for request in requests:
            self.submit(request)
        while self.has_work:
            yield from self.step()

    def _num_free_rows(self) -> int:
        return min(len(self.waiting), self.max_rows - len(self.running))

    def _admit(self, request: Request) -> tuple[Request, Piece]:
        self.running.append(request)
        prefill(self.base_model, self.state, request.prompt_ids, self._rule())
        piece = request.emit([int(self.state.root[-1])])
        self._drop_finished()
        return request, piece

    def _decode(self) -> list[tuple[Request, Piece]]:
        step = decode_step(self.base_model, self.state, self._rule())
        rows = zip(self.running, step.tokens.tolist(), step.counts.tolist(), step.num_drafted.tolist(), strict=True)
        pieces = [(request, request.emit(row[:count], drafted)) for request, row, count, drafted in rows]
        self._drop_finished()
        return pieces

    def _rule(self) -> AcceptanceRule:
        """Every row is decoded as its request asks, whoever the others are."""
        return rule_for([request.sampler for request in self.running])

    def _drop_finished(self) -> None:
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row].finish_reason:
                self.state.remove(row)
                self.running[row] = self.running[-1]
                self.running.pop()


def check_length(base_model: BaseModel, request: Request) -> None:
    """Raises ValueError when prompt and answer together pass the model's context length."""
    if request.capacity > base_model.max_positions:
        prompt = len(request.prompt_ids)
        raise ValueError(
            f"request: {prompt} prompt tokens and {request.max_new_tokens} new ones make {request.capacity}, more than "
            f"the {base_model.max_positions} of the model's context; lower max_new_tokens to "
            f"{max(0, base_model.max_positions - prompt)} or shorten the prompt"
        )
