"""From the engine's thread to the event loop, and on to the client; whoever goes away frees its rows."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..request import Piece, Request
from ..service import Draining, Failed, Finished, QueueFull
from .context import ServerContext
from .errors import ApiError, draining, error_response, from_value_error, too_busy

T = TypeVar("T")
CLIENT_GONE = 499  # as nginx logs it; nobody is there to read it
DONE = "data: [DONE]\n\n"


class Running:
    """One HTTP request's engine requests, from submission to their ends."""

    def __init__(self, context: ServerContext, requests: list[Request]) -> None:
        """Submits all of them, or none. Raises ApiError 400 for what does not fit, 429, 503."""
        self._context, self.requests = context, requests
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Piece | Finished | Failed]] = asyncio.Queue()
        try:
            for index, request in enumerate(requests):
                context.service.submit(request, partial(self._take, index, _Clock()))
        except QueueFull as error:
            self.cancel()
            raise too_busy(error.retry_after_s) from error
        except Draining as error:
            self.cancel()
            raise draining() from error
        except ValueError as error:
            self.cancel()
            raise from_value_error(error) from error

    def _take(self, index: int, clock: _Clock, event: Piece | Finished | Failed) -> None:
        """Called from the engine's thread."""
        if isinstance(event, Piece) and event.token_ids:
            self._context.metrics.on_piece(self.requests[index], clock.lap(), len(event.token_ids))
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

    async def events(self) -> AsyncIterator[tuple[int, Piece | Finished]]:
        """(choice, what it gained or how it ended), until all have ended. Raises ApiError where one failed."""
        left = len(self.requests)
        try:
            while left:
                index, event = await self._queue.get()
                if isinstance(event, Failed):
                    raise self._failure(event.error)
                if isinstance(event, Finished):
                    left -= 1
                    if event.finish_reason == "abort":
                        raise draining() if self._context.is_draining else _timed_out(self.requests[index])
                yield index, event
        finally:
            self.cancel()

    def cancel(self) -> None:
        for request in self.requests:
            self._context.service.cancel(request)

    def _failure(self, error: Exception) -> ApiError:
        if isinstance(error, ValueError):
            return from_value_error(error)
        return ApiError(500, "the engine failed; the server's log says more")


class _Clock:
    """Seconds between pieces; None before the first."""

    def __init__(self) -> None:
        self._last: float | None = None

    def lap(self) -> float | None:
        last, self._last = self._last, time.perf_counter()
        return None if last is None else self._last - last


def _timed_out(request: Request) -> ApiError:
    return ApiError(504, f"the request passed its time limit after {len(request.token_ids)} tokens")


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled where the client goes away first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_GONE, "the client has gone away")
        return task.result()
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of `events` (JSON objects), then `[DONE]`. An error on the way is an event, too."""

    media_type = "text/event-stream"

    def __init__(self, running: Running, events: AsyncIterator[dict[str, Any]]) -> None:
        self._running = running
        # A proxy that buffers would undo the streaming.
        super().__init__(_encoded(events), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def _encoded(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
    except HTTPException as error:
        body = json.loads(bytes(error_response(error).body))
        yield f"data: {json.dumps(body)}\n\n"
    yield DONE
