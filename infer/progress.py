"""Progress of long work: rate and time left on a terminal, a line now and then where output is piped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_SECONDS = 15.0


class TokenProgress:
    """Counts items, and the tokens they took."""

    def __init__(self, console: Console, name: str, total: int, unit: str) -> None:
        self.num_items, self.num_tokens, self._total, self._name, self._unit = 0, 0, total, name, unit
        self._console, self._started = console, time.monotonic()
        self._said = self._started
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn(f"{name:>9}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task(name, total=total, rate="")

    def advance(self, items: int, *, tokens: int = 0) -> None:
        self.num_items += items
        self.num_tokens += tokens
        elapsed = max(time.monotonic() - self._started, 1e-9)
        rate = f"{self.num_tokens / elapsed:.0f} tokens/s" if self.num_tokens else f"{self.num_items / elapsed:.1f}/s"
        if self._bar:
            self._bar.update(self._task, advance=items, rate=rate)
        elif time.monotonic() - self._said > QUIET_SECONDS:
            self._said = time.monotonic()
            left = elapsed / max(self.num_items, 1) * (self._total - self.num_items)
            self._console.print(
                f"{self._name}: {self.num_items} of {self._total} {self._unit}, {rate}, about {left:.0f} s left"
            )


@contextmanager
def token_progress(console: Console, name: str, total: int, unit: str) -> Iterator[TokenProgress]:
    progress = TokenProgress(console, name, total, unit)
    if progress._bar:
        with progress._bar:
            yield progress
    else:
        yield progress
