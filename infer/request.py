"""One request on its way through the engine: its limits, the tokens so far, and what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from medusa.acceptance import Failure
from medusa.row_sampler import RowSampler
from medusa.sampling import GREEDY_SAMPLING, SamplingParams, Typical

from .detokenize import Detokenizer, StopMatcher
from .logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "abort"]


@dataclass
class GenerationStats:
    """steps: verify steps. accepted_by_position[d]: drafted tokens kept at depth d + 1. Times in seconds; queue_s:
    until the request got a row, prefill_s: from then to its first token, decode_s: from there to its last."""

    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    time_to_first_token_s: float = 0.0
    seconds: float = 0.0
    queue_s: float = 0.0

    @property
    def prefill_s(self) -> float:
        return max(0.0, self.time_to_first_token_s - self.queue_s)

    @property
    def decode_s(self) -> float:
        return self.seconds - self.time_to_first_token_s

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
    drafted (the others the base had to produce itself). logprobs: one for each token, None where not asked for."""

    text: str
    token_ids: list[int]
    num_drafted_accepted: int
    logprobs: list[TokenLogprob] | None = None


@dataclass
class Request:
    """prompt_ids: the whole prompt. stop: strings that end the answer and are not part of it; stop_token_ids: tokens
    that end it and are. sampling: how its tokens are chosen. typical: the lossy acceptance rule where one is wanted;
    None is lossless. speculate: False drafts nothing for it.

    num_logprobs: None for none; n: the base's log-probability of every emitted token and of the n likeliest.
    prompt_logprobs: the same for the prompt, in `prompt_token_logprobs` (None for its first token); such a prompt is
    always computed whole. deadline: the `time.monotonic()` at which it is aborted.

    It ends with a `finish_reason` (then `stop_reason` says which stop string or token it was, None where it was an
    ending token of the model, or none) or with an `error`. num_cached_tokens: prompt tokens that were not computed.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    tokenizer: Any
    stop: list[str] = field(default_factory=list)
    sampling: SamplingParams = GREEDY_SAMPLING
    typical: Typical | None = None
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None
    prompt_logprobs: bool = False
    speculate: bool = True
    deadline: float | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    num_cached_tokens: int = 0
    prompt_token_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt: got no tokens at all, expected at least one; give some text")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        if any(not stop for stop in self.stop):
            raise ValueError("stop: an empty string would stop every answer before it begins; leave it out")
        if self.num_logprobs is not None and self.num_logprobs < 0:
            raise ValueError(
                f"num_logprobs is {self.num_logprobs}, expected 0 or more, or None for no log-probabilities"
            )
        self.sampler = RowSampler(self.sampling, self.prompt_ids, self.token_ids, self.typical)
        self._detokenizer = Detokenizer(self.tokenizer)
        self._stop_matcher = StopMatcher(self.stop)
        self._started = time.perf_counter()
        self._cancelled = False

    @property
    def capacity(self) -> int:
        """Most tokens that the cache may have to hold for it."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def is_overdue(self) -> bool:
        """Cancelled, or past its deadline."""
        return self._cancelled or (self.deadline is not None and time.monotonic() >= self.deadline)

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def count_queued(self) -> None:
        """It waits no longer."""
        self.stats.queue_s = time.perf_counter() - self._started

    def cancel(self) -> None:
        """The engine aborts it at its next step. May be called from any thread, and again."""
        self._cancelled = True

    def abort(self) -> Piece:
        """End it here; what stop strings held back is given out."""
        self.finish_reason = "abort"
        self.stats.seconds = time.perf_counter() - self._started
        text = self._last_text()
        self.text += text
        return Piece(text, [], 0)

    def fail(self, error: Exception) -> None:
        """End it with an error; what came before stays."""
        self.error = error
        self.stats.seconds = time.perf_counter() - self._started

    def emit(
        self,
        tokens: list[int],
        num_drafted: int = 0,
        logprobs: list[TokenLogprob] | None = None,
        failure: Failure | None = None,
    ) -> Piece:
        """Take one step's tokens, up to the limit, an ending token or a stop string; the rest is dropped.

        The last of `tokens` is the base's own, those before it were drafted. logprobs: one for each. failure: it ends
        with that error, unless its tokens before that end it already.
        """
        text, taken = "", 0
        for token in tokens[: failure.num_tokens] if failure else tokens:
            taken += 1
            self.token_ids.append(token)
            text += self._stop_matcher.feed(self._detokenizer.add(token))
            self._check_end(token)
            if self.finish_reason:
                break
        if self.finish_reason and self._stop_matcher.matched is None:
            text += self._last_text()
        if failure and not self.finish_reason:
            self.error = failure.error
        self._count(taken, num_drafted)
        self.text += text
        drafted = taken if taken < len(tokens) else taken - 1
        return Piece(text, tokens[:taken], drafted, logprobs[:taken] if logprobs is not None else None)

    def _check_end(self, token: int) -> None:
        matched = self._stop_matcher.matched
        if token in self.eos_token_ids or token in self.stop_token_ids or matched is not None:
            self.finish_reason = "stop"
            if matched is not None:
                self.stop_reason = matched
            elif token not in self.eos_token_ids:
                self.stop_reason = token
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "length"

    def _last_text(self) -> str:
        return self._stop_matcher.feed(self._detokenizer.finish()) + self._stop_matcher.flush()

    def _count(self, taken: int, num_drafted: int) -> None:
        elapsed = time.perf_counter() - self._started
        if self.stats.num_tokens == 0:
            self.stats.time_to_first_token_s = elapsed
        else:
            self.stats.count_step(taken, num_drafted)
        self.stats.num_tokens += taken
        self.stats.seconds = elapsed
