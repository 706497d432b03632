"""A thread that ends takes OpenMP's helpers with it; one that lives keeps them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa.infer.short_thread import in_short_thread

COUNT = """
import os, sys, time, torch
from medusa.infer.short_thread import in_short_thread

def compute():
    return torch.zeros(1 << 20).exp()

def num_threads():
    return len(os.listdir("/proc/self/task"))

before = num_threads()
in_short_thread(compute) if sys.argv[1] == "short" else compute()
end = time.monotonic() + float(sys.argv[2])  # they end a moment later
while num_threads() > before and time.monotonic() < end:
    time.sleep(0.01)
print(num_threads() - before)
"""


def num_left(thread: str, wait_s: float) -> int:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", COUNT, thread, str(wait_s)]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(
    not Path("/proc/self/task").exists() or os.cpu_count() == 1,
    reason="counts threads as Linux shows them; torch starts no more of them than there are cores",
)
def test_no_helpers_are_left():
    assert num_left("main", 1) == 1  # the control
    assert num_left("short", 30) == 0


def test_it_gives_what_the_function_returns_or_raises():
    assert in_short_thread(lambda: 3) == 3
    assert in_short_thread(lambda: None) is None
    with pytest.raises(SystemExit, match="enough"):
        in_short_thread(lambda: sys.exit("enough"))
