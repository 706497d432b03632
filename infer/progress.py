"""Progress of work that is counted in items, prompts say, and in the tokens they took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from medusa.progress import StageProgress


class TokenProgress:
    def __init__(self, bar: StageProgress, total: int, unit: str) -> None:
        self.num_items, self.num_tokens = 0, 0
        self._bar, self._total, self._unit, self._began = bar, total, unit, time.monotonic()

    def advance(self, items: int, *, tokens: int = 0) -> None:
        self.num_items += items
        self.num_tokens += tokens
        elapsed = max(time.monotonic() - self._began, 1e-9)
        rate = f"{self.num_tokens / elapsed:.0f} tokens/s" if self.num_tokens else f"{self.num_items / elapsed:.1f}/s"
        self._bar.update(self.num_items, f"{self.num_items} of {self._total} {self._unit}, {rate}")


@contextmanager
def token_progress(console: Console, name: str, total: int, unit: str) -> Iterator[TokenProgress]:
    with StageProgress(name, total, console) as bar:
        yield TokenProgress(bar, total, unit)
