"""Progress of long stages for a person: a bar with rate and time left in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 15.0


class StageProgress:
    """`total` and `advance`: in any unit that is proportional to time. `console` None: silent."""

    def __init__(self, title: str, total: float, console: Console | None, done: float = 0.0) -> None:
        self.title, self.total, self.done, self.console = title, max(total, 1e-9), done, console
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        is_shown = console is not None and console.is_terminal
        self._bar = Progress(*columns, console=console, disable=not is_shown)
        self._task = self._bar.add_task(title, total=self.total, status="")
        self._bar.update(self._task, completed=done)
        self._last_line = time.monotonic()
        self._began, self._done_before = self._last_line, done

    def __enter__(self) -> StageProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, done: float, status: str) -> None:
        """`done` of `total`; `status`: what to show beside the bar, with the rate."""
        self.done = done
        self._bar.update(self._task, completed=done, status=status)
        now = time.monotonic()
        if self.console is not None and not self.console.is_terminal and self._is_due(now):
            self._last_line = now
            gained = done - self._done_before
            left = f", {(self.total - done) * (now - self._began) / gained:,.0f} s left" if gained > 0 else ""
            self.console.print(f"{self.title}: {done / self.total:.0%}, {status}{left}", highlight=False)

    def _is_due(self, now: float) -> bool:
        return now - self._last_line >= SECONDS_BETWEEN_LINES or self.done >= self.total
