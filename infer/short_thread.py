"""Work that is done in a thread which ends with it, so that it leaves none of OpenMP's behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_short_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises.

    GNU's OpenMP, which torch comes with, gives each thread that computes helpers of its own and keeps them until that
    thread ends. Helpers of a second thread beside them slow products down: on two cores a server that had loaded its
    model in the main thread gave 0.67 to 0.82 of the engine's speed, one that loads it in here all of it. Most likely
    because libgomp lets helpers wait awake only while there are no more threads than cores. So whatever computes before
    the one thread that is to compute from then on belongs in here.
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
