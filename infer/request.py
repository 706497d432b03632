"""One request on its way through the engine: its limits, the tokens so far, and what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from medusa.row_sampler import RowSampler
from medusa.sampling import GREEDY_SAMPLING, SamplingParams, Typical

from .detokenize import Detokenizer, StopMatcher

FinishReason = Literal["stop", "length"]


@dataclass
class GenerationStats:
    """steps: verify steps. accepted_by_position[d]: drafted tokens kept at depth d + 1. Times in seconds."""

    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    time_to_first_token_s: float = 0.0
    seconds: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """tau: tokens per verify step, bonus token included; the prefill's own token is not counted."""
        return (self.num_tokens - 1) / self.num_steps if self.num_steps else 1.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def count_step(self, num_emitted: int, num_drafted: int) -> None:
        self.num_steps += 1
        self.num_drafted += num_drafted
        for depth in range(num_emitted - 1):
            if depth == len(self.accepted_by_position):
                self.accepted_by_position.append(0)
            self.accepted_by_position[depth] += 1


@dataclass(frozen=True)
class Piece:
    """A bit of streamed answer: the text that became certain in one step, its tokens, and how many of them had been
    drafted (the others the base had to produce itself)."""

    text: str
    token_ids: list[int]
    num_drafted_accepted: int


@dataclass
class Request:
    """prompt_ids: the whole prompt. stop: strings that end the answer and are not part of it. sampling: how its tokens
    are chosen. typical: the lossy acceptance rule where one is wanted; None is lossless."""

    prompt_ids: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    tokenizer: Any
    stop: list[str] = field(default_factory=list)
    sampling: SamplingParams = GREEDY_SAMPLING
    typical: Typical | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt: got no tokens at all, expected at least one; give some text")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        if any(not stop for stop in self.stop):
            raise ValueError("stop: an empty string would stop every answer before it begins; leave it out")
        self.sampler = RowSampler(self.sampling, self.prompt_ids, self.token_ids, self.typical)
        self._detokenizer = Detokenizer(self.tokenizer)
        self._stop_matcher = StopMatcher(self.stop)
        self._started = time.perf_counter()

    @property
    def capacity(self) -> int:
        """Most tokens that the cache may have to hold for it."""
        return len(self.prompt_ids) + self.max_new_tokens

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def emit(self, tokens: list[int], num_drafted: int = 0) -> Piece:
        """Take one step's tokens, up to the limit, an end-of-sequence token or a stop string; the rest is dropped.

        The last of `tokens` is the base's own, those before it were drafted.
        """
        text, taken = "", 0
        for token in tokens:
            taken += 1
            self.token_ids.append(token)
            text += self._stop_matcher.feed(self._detokenizer.add(token))
            if token in self.eos_token_ids or self._stop_matcher.matched is not None:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        if self.finish_reason and self._stop_matcher.matched is None:
            text += self._stop_matcher.feed(self._detokenizer.finish()) + self._stop_matcher.flush()
        self._count(taken, num_drafted)
        self.text += text
        return Piece(text, tokens[:taken], taken if taken < len(tokens) else taken - 1)

    def _count(self, taken: int, num_drafted: int) -> None:
        elapsed = time.perf_counter() - self._started
        if self.stats.num_tokens == 0:
            self.stats.time_to_first_token_s = elapsed
        else:
            self.stats.count_step(taken, num_drafted)
        self.stats.num_tokens += taken
        self.stats.seconds = elapsed
