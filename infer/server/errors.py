"""Errors in OpenAI's shape, whatever went wrong: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from .responses import ErrorContent, ErrorResponse, to_json

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
ERRORS_SHOWN = 3


class ApiError(HTTPException):
    """What a route raises. param: the body's field that is to blame."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def from_value_error(error: ValueError, default_param: str | None = None) -> ApiError:
    """The engine's own words; they begin with the name of the setting that is to blame."""
    name = re.match(r"([a-z_]+)(:| is )", str(error))
    return bad_request(str(error), name[1] if name and name[1] != "request" else default_param)


def too_busy(retry_after_s: float) -> ApiError:
    seconds = max(1, math.ceil(retry_after_s))
    return ApiError(429, f"the queue is full; try again in {seconds} s", headers={"Retry-After": str(seconds)})


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down and takes no more requests", headers={"Retry-After": "5"})


def error_body(status: int, message: str, param: str | None = None) -> dict[str, object]:
    kind = TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return to_json(ErrorResponse(error=ErrorContent(message=message, type=kind, param=param, code=status)))


def error_response(error: HTTPException) -> JSONResponse:
    param = error.param if isinstance(error, ApiError) else None
    body = error_body(error.status_code, str(error.detail), param)
    return JSONResponse(body, error.status_code, headers=error.headers)


def from_validation(error: RequestValidationError) -> ApiError:
    """A body that is not what the schema says. Says where, never what was sent."""
    problems = error.errors()
    if any(problem["type"] == "json_invalid" for problem in problems):
        return bad_request("the body is not valid JSON")
    if any(problem["loc"] == ("body",) for problem in problems):
        return bad_request("expected a JSON object as the body, and the header Content-Type: application/json")
    lines = [f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in problems]
    more = f" (and {len(lines) - ERRORS_SHOWN} more)" if len(lines) > ERRORS_SHOWN else ""
    return bad_request("; ".join(lines[:ERRORS_SHOWN]) + more, str(problems[0]["loc"][1]))


def add_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(from_validation(error))
