"""The engine behind a thread of its own, for a server: requests from any thread in, pieces out to their sinks.

Only that thread touches the engine. It sleeps while there is nothing to do, so that an idle server costs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .engine import Engine
from .request import FinishReason, Piece, Request

logger = logging.getLogger(__name__)

DECAY = 0.9  # of the mean time between answers, an answer


class QueueFull(Exception):
    """As many requests as may wait are waiting. retry_after_s: seconds in which one is likely to get a place."""

    def __init__(self, max_waiting: int, retry_after_s: float) -> None:
        super().__init__(f"the queue is full: {max_waiting} requests wait already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class Draining(Exception):
    """No more requests are taken: the service is shutting down, or its engine has died."""


@dataclass(frozen=True)
class Finished:
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True)
class Failed:
    error: Exception


Event = Piece | Finished | Failed
Sink = Callable[[Event], None]


@dataclass(frozen=True)
class EngineLoad:
    """num_running: requests with a row, prompts on their way among them. Tokens of the rows' keys and values; bytes of
    the prefix cache. The totals count prompts since the start, and of these what the prefix cache gave."""

    num_running: int = 0
    num_waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0
    prefix_cache_bytes: int = 0
    prefix_cache_capacity_bytes: int = 0
    num_prompt_tokens_total: int = 0
    num_cached_tokens_total: int = 0


class StepListener(Protocol):
    """For metrics. Called from the engine's thread, which waits for it."""

    def on_step(self, num_tokens: int, seconds: float, load: EngineLoad) -> None:
        """After a step: tokens emitted for all requests together."""

    def on_first_token(self, request: Request) -> None: ...

    def on_finished(self, request: Request) -> None:
        """With its finish_reason or error."""


class EngineService:
    """max_waiting: requests beyond the engine's rows; more are refused. listener: see `StepListener`.

    On a CPU, load the model and warm the engine up with `in_short_thread`, which says why.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 128, listener: StepListener | None = None) -> None:
        if max_waiting < 0:
            raise ValueError(f"max_waiting is {max_waiting}, expected 0 or more requests")
        self.engine, self.max_waiting, self._listener = engine, max_waiting, listener
        self._thread = threading.Thread(target=self._run, name="medusa-engine", daemon=True)
        self._changed = threading.Condition()  # guards what follows
        self._inbox: list[Request] = []
        self._sinks: dict[int, tuple[Request, Sink]] = {}  # of all requests that have not ended, by id()
        self._is_draining = self._is_stopping = False
        self._error: BaseException | None = None
        self._load = _measure(engine)
        self._mean_gap_s, self._last_end = 1.0, time.monotonic()

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once the engine's thread has died of an error."""
        return self._error is None

    def submit(self, request: Request, sink: Sink) -> None:
        """Take a request; `sink` gets its pieces from the engine's thread, then one `Finished` or `Failed`.

        Raises ValueError for one that does not fit, QueueFull and Draining.
        """
        self.engine.check(request)
        with self._changed:
            if self._is_draining or self._error is not None:
                raise Draining("the engine takes no more requests")
            if len(self._sinks) >= self.engine.max_rows + self.max_waiting:
                raise QueueFull(self.max_waiting, max(1.0, self._mean_gap_s))
            request.start_clock()
            self._sinks[id(request)] = request, sink
            self._inbox.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Its row is free after the step that runs now, and it ends with "abort"; nothing, where it has ended."""
        request.cancel()

    def load(self) -> EngineLoad:
        """As of the last step, but for the queue."""
        with self._changed:
            return _with_waiting(self._load, len(self._sinks))

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests, wait until all have ended, abort those that have not after `timeout_s`, and stop the
        thread. Returns whether all could end by themselves."""
        with self._changed:
            self._is_draining = True
            is_done = self._changed.wait_for(lambda: not self._sinks, timeout_s)
            for request, _ in self._sinks.values():
                request.cancel()
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        return is_done and self.alive

    def _run(self) -> None:
        try:
            while self._take_in():
                self._step()
        except BaseException as error:
            logger.exception("the engine's thread died")
            self._die(error)

    def _take_in(self) -> bool:
        """Hand new requests to the engine, wait where there is nothing to do. False: stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._is_stopping or self.engine.has_work)
            new, self._inbox = self._inbox, []
        for request in new:
            self.engine.submit(request)
        return self.engine.has_work

    def _step(self) -> None:
        start = time.perf_counter()
        gained = self.engine.step()
        seconds = time.perf_counter() - start
        num_tokens = 0
        for request, piece in gained:
            num_tokens += len(piece.token_ids)
            self._deliver(request, piece)
        load = _measure(self.engine)
        with self._changed:
            self._load = load
            load = _with_waiting(load, len(self._sinks))
        self._tell("on_step", num_tokens, seconds, load)

    def _deliver(self, request: Request, piece: Piece) -> None:
        _, sink = self._sinks[id(request)]
        if piece.token_ids or piece.text:
            self._send(request, sink, piece)
        if piece.token_ids and len(piece.token_ids) == len(request.token_ids):
            self._tell("on_first_token", request)
        if not request.is_finished:
            return
        self._tell("on_finished", request)
        with self._changed:
            del self._sinks[id(request)]
            self._count_gap(request)
            self._changed.notify_all()
        self._send(request, sink, _end_of(request))

    def _count_gap(self, request: Request) -> None:
        """Time since the last answer; not that in which nobody asked anything."""
        now = time.monotonic()
        gap = min(now - self._last_end, request.stats.seconds)
        self._mean_gap_s, self._last_end = DECAY * self._mean_gap_s + (1 - DECAY) * gap, now

    def _send(self, request: Request, sink: Sink, event: Event) -> None:
        try:
            sink(event)
        except Exception:  # the receiver's fault, such as an event loop that is closed: the others must not suffer
            logger.exception("a request's receiver failed; the request is cancelled")
            request.cancel()

    def _tell(self, method: str, *arguments: Any) -> None:
        if self._listener is None:
            return
        try:
            getattr(self._listener, method)(*arguments)
        except Exception:  # statistics that fail must not stop the answers
            logger.exception("the step listener failed")

    def _die(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            left, self._sinks, self._inbox = list(self._sinks.values()), {}, []
            self._changed.notify_all()
        failure = RuntimeError(f"the engine died: {type(error).__name__}: {error}")
        for request, sink in left:
            request.fail(failure)
            self._send(request, sink, Failed(failure))


def _end_of(request: Request) -> Finished | Failed:
    if request.error is not None:
        return Failed(request.error)
    assert request.finish_reason is not None
    return Finished(request.finish_reason, request.stop_reason)


def _measure(engine: Engine) -> EngineLoad:
    """All but the queue."""
    cache, admissions = engine.prefix_cache, engine.admissions
    return EngineLoad(
        num_running=len(engine.running) + len(admissions),
        kv_tokens_used=int(engine.state.cache.lengths.sum()),
        kv_tokens_capacity=engine.max_rows * engine.capacity,
        prefix_cache_bytes=cache.num_bytes if cache else 0,
        prefix_cache_capacity_bytes=cache.max_bytes if cache else 0,
        num_prompt_tokens_total=admissions.num_prompt_tokens,
        num_cached_tokens_total=admissions.num_cached_tokens,
    )


def _with_waiting(load: EngineLoad, num_requests: int) -> EngineLoad:
    return replace(load, num_waiting=max(0, num_requests - load.num_running))
