"""A thread that ends takes OpenMP's helpers with it; one that lives keeps them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa.infer.short_thread import in_short_thread

COUNT = """
import os, sys, torch
from medusa.infer.short_thread import in_short_thread

def compute():
    return torch.randn(512, 512) @ torch.randn(512, 512)

before = len(os.listdir("/proc/self/task"))
in_short_thread(compute) if sys.argv[1] == "short" else compute()
print(len(os.listdir("/proc/self/task")) - before)
"""


def num_left(thread: str) -> int:
    environment = os.environ | {"OMP_NUM_THREADS": "4"}
    command = [sys.executable, "-c", COUNT, thread]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
def test_no_helpers_are_left():
    assert num_left("main") == 3  # the control
    assert num_left("short") == 0


def test_it_gives_what_the_function_returns_or_raises():
    assert in_short_thread(lambda: 3) == 3
    assert in_short_thread(lambda: None) is None
    with pytest.raises(SystemExit, match="enough"):
        in_short_thread(lambda: sys.exit("enough"))
