"""SIGINT and SIGTERM as a wish that the training loop grants at the next step boundary."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class TrainingInterrupted(Exception):
    """Training was asked to stop; it has saved its state. `str()` says how to continue."""


class StopSignals:
    """While entered, the first signal sets `received`; a second one acts as it would have without this."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # handlers cannot be set from others
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
