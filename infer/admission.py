"""Prompts on their way into the batch, a chunk at a time, while the live rows go on decoding.

Each prompt is filled into a free row of the cache above the live ones, `0..B-1`, and becomes row B when it is whole.
Memory: no second cache; prompts and live rows share `max_rows`, and there is one spare row more (none where `max_rows`
is 1), so that a prompt that is in the way of another one can step aside.

Order: the prompt with the fewest tokens left goes first, but every other turn is the oldest one's. So a short prompt
waits for one chunk of a long one at most, and a long one gets every second chunk however many short ones come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.base_model import BaseModel

from .decode import DecodeState, prefill
from .logprobs import token_logprobs
from .prefix_cache import PrefixCache
from .request import Request


@dataclass
class Admission:
    """A request and the row that holds its prompt's first `num_done` tokens."""

    request: Request
    row: int
    num_done: int = 0

    @property
    def num_left(self) -> int:
        return len(self.request.prompt_ids) - self.num_done


class Admissions:
    """The prompts that are being computed, oldest first, in rows of `state`. num_prompt_tokens: of all that were ever
    admitted; num_cached_tokens: how many of these came out of the prefix cache."""

    def __init__(self, base_model: BaseModel, state: DecodeState, prefix_cache: PrefixCache | None) -> None:
        self._base_model, self._state, self._prefix_cache = base_model, state, prefix_cache
        self._admissions: list[Admission] = []
        self._last: Admission | None = None
        self.num_prompt_tokens = self.num_cached_tokens = 0

    def __len__(self) -> int:
        return len(self._admissions)

    @property
    def requests(self) -> list[Request]:
        return [admission.request for admission in self._admissions]

    def admit(self, request: Request) -> None:
        """Give it a row, and what the prefix cache knows of its prompt."""
        row = self._free_row()
        self._state.clear_row(row)
        if not request.speculate:
            self._state.drafter.mute_row(row)
        num_cached = self._restore(request, row)
        self._admissions.append(Admission(request, row, num_cached))
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_cached_tokens += num_cached

    def next(self) -> Admission:
        """Whose turn it is."""
        oldest = self._admissions[0]
        shortest = min(self._admissions, key=lambda admission: admission.num_left)
        self._last = shortest if self._last is oldest else oldest
        return self._last

    def advance(self, admission: Admission, max_tokens: int) -> Tensor:
        """Compute the next tokens of its prompt; returns the last one's state, [1, D]."""
        ids, start = admission.request.prompt_ids, admission.num_done
        chunk = ids[start : start + max_tokens]
        hidden = prefill(self._base_model, self._state, admission.row, chunk)
        admission.num_done += len(chunk)
        if admission.request.prompt_logprobs:
            self._score(admission.request, ids[start + 1 : admission.num_done + 1], hidden)
        return hidden[-1:]

    def make_live(self, admission: Admission) -> None:
        """Its prompt is whole: move it to row B, and whatever prompt is there out of the way."""
        target = self._state.num_rows
        for other in self._admissions:
            if other is not admission and other.row == target:
                other.row = self._free_row()
                self._state.move_row(target, other.row)
        if admission.row != target:
            self._state.move_row(admission.row, target)
            self._state.clear_row(admission.row)
        self._admissions.remove(admission)

    def drop(self, request: Request) -> None:
        """Free its row."""
        [admission] = [admission for admission in self._admissions if admission.request is request]
        self._state.clear_row(admission.row)
        self._admissions.remove(admission)

    def _free_row(self) -> int:
        """The highest: the next row to be live is better left free."""
        taken = {admission.row for admission in self._admissions}
        rows = range(self._state.num_rows, self._state.cache.num_rows)
        return max(row for row in rows if row not in taken)

    def _restore(self, request: Request, row: int) -> int:
        if self._prefix_cache is None or request.prompt_logprobs:
            return 0
        # The last token is always computed: its state chooses the answer's first one.
        known = request.prompt_ids[:-1]
        num_known = request.num_cached_tokens = self._prefix_cache.restore(self._state.cache, row, known)
        if num_known:
            tokens, counts = torch.tensor([known[:num_known]]), torch.tensor([num_known])
            self._state.drafter.observe(slice(row, row + 1), tokens, counts, None)
        return num_known

    def _score(self, request: Request, token_ids: list[int], hidden: Tensor) -> None:
        """token_ids: those that come after the states `hidden`, the prompt's last state having none."""
        if not request.prompt_token_logprobs:
            request.prompt_token_logprobs.append(None)
        logits = self._base_model.logits(hidden[: len(token_ids)])
        request.prompt_token_logprobs += token_logprobs(logits, token_ids, request.num_logprobs or 0)
