"""What every request passes on its way in and out: request id, API key, body limit, errors, log line, count."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import ApiKeys
from .errors import ApiError, error_response
from .limits import Limits
from .metrics import Metrics
from .request_log import log, request_id

# Without a key: the page (which holds no secret and asks for the key) and what a load balancer asks.
OPEN_PATHS = ("/", "/health")
OPEN_PREFIX = "/playground/"
SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}


@dataclass
class _Exchange:
    """One request: status is 0 until the response begins."""

    id: str
    scope: Scope
    started: float
    status: int = 0


class Gate:
    """ASGI middleware, outermost."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, limits: Limits, metrics: Metrics) -> None:
        self._app, self._keys, self._limits, self._metrics = app, keys, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = _Exchange(request_id(headers.get("x-request-id")), scope, time.perf_counter())
        answer = self._answering(exchange, send)
        try:
            self._check(scope, headers)
            await self._app(scope, self._limited(receive), answer)
        except HTTPException as error:
            await error_response(error)(scope, receive, answer)
        except Exception:  # the outermost place: whatever it is, the client is told and the log says what
            log("request failed", logging.ERROR, exc_info=True, request_id=exchange.id)
            if not exchange.status:
                failure = ApiError(500, "internal error; the server's log says more")
                await error_response(failure)(scope, receive, answer)
        finally:
            self._note(exchange)

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIX)
        if not is_open and scope["method"] != "OPTIONS":  # a browser's preflight comes without
            self._keys.check(headers.get("authorization"))
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise _too_large(self._limits)

    def _limited(self, receive: Receive) -> Receive:
        size, complete = 0, False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:  # now it only waits for the client to go away
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._limits.body_timeout_s)
            except asyncio.TimeoutError as error:
                raise ApiError(408, "the body did not arrive in time") from error
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self._limits.max_body_bytes:
                raise _too_large(self._limits)
            return message

        return limited

    def _answering(self, exchange: _Exchange, send: Send) -> Send:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = exchange.id
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        return answer

    def _note(self, exchange: _Exchange) -> None:
        scope, seconds = exchange.scope, time.perf_counter() - exchange.started
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.on_http(_method(scope), route, exchange.status)
        log(
            "request",
            request_id=exchange.id,
            client=(scope.get("client") or ("unknown",))[0],
            method=scope["method"],
            route=route,
            status=exchange.status,
            seconds=round(seconds, 4),
        )


def _method(scope: Scope) -> str:
    """Strangers' inventions are one series, not one each."""
    return scope["method"] if scope["method"] in ("GET", "POST", "OPTIONS", "HEAD") else "other"


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is over {limits.max_body_bytes} bytes")
