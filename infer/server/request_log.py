"""One line a request, as JSON or as text: who, what, how long, how it ended. Never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from typing import Any, Literal

LOGGER = "medusa.server"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

LogFormat = Literal["text", "json"]


def request_id(given: str | None) -> str:
    """The client's own where it is one that a log line can hold, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex[:16]}"


class _Lines(logging.Formatter):
    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._as_json = log_format == "json"
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z"
        fields: dict[str, Any] = getattr(record, "fields", {})
        failure = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {"time": stamp, "level": record.levelname.lower(), "message": record.getMessage(), **fields}
            return json.dumps(line | ({"traceback": failure} if failure else {}), ensure_ascii=False)
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        return f"{stamp} {record.levelname.lower()} {record.getMessage()} {words}".rstrip() + (
            f"\n{failure}" if failure else ""
        )


def configure_logging(log_format: LogFormat, level: str = "INFO") -> None:
    """For a process of its own: this server's and uvicorn's lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(log_format))
    for name in (LOGGER, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    # Its own words about start and stop say less than ours; an access line would double each request's.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def log(message: str, level: int = logging.INFO, *, exc_info: bool = False, **fields: Any) -> None:
    logging.getLogger(LOGGER).log(level, message, extra={"fields": fields}, exc_info=exc_info)
