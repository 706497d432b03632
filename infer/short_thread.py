"""Work that is done in a thread which ends with it, so that it leaves none of OpenMP's behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_short_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises.

    GNU's OpenMP, which torch comes with, gives each thread that computes helpers of its own and keeps them until that
    thread ends. As soon as there are more threads in all than cores, no helper waits awake for its next task: all are
    put to sleep and woken for each product, which costs a server on two cores a quarter of its speed. So whatever
    computes before the one thread that is to compute from then on belongs in here.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # whatever it is, it is the caller's
            errors.append(error)

    thread = threading.Thread(target=run, name="medusa-start", daemon=True)  # Ctrl-C need not wait for it
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
