"""What tests launch in place of `-m medusa train`: several runs in one launch, each to its end or stopped on the way.

    distributed_worker.py '[{"config": FILE, "stop_after": 10}, ...]'

The first process prints a JSON line per run: how it ended, and elements of optimizer state on each process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys

from rich.console import Console

from medusa.train import loop
from medusa.train.config import load_config
from medusa.train.run import train
from medusa.train.signals import TrainingInterrupted

if importlib.util.find_spec("deepspeed"):
    import deepspeed.ops

    # An optional shortcut through shared memory that is compiled on first use, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

save_state, forward = loop.save_state, loop.forward


def run(config, stop_after=None, fail_at=None):
    held = 0

    def saving(path, state, identity, writes):
        nonlocal held
        save_state(path, state, identity, writes)
        inner = state.optimizer.engine.optimizer if hasattr(state.optimizer, "engine") else state.optimizer.optimizer
        held = sum(tensor.numel() for moments in inner.state.values() for tensor in moments.values() if tensor.dim())
        if state.counters.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def failing(run, indices, ramp=0.0):
        if run.processes.rank == 1 and run.state.counters.step == fail_at:
            raise RuntimeError("made to fail")
        return forward(run, indices, ramp)

    loop.save_state, loop.forward = saving, failing
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        train(load_config(config), Console(width=120) if is_main else None)
        end = "finished"
    except TrainingInterrupted:
        end = "interrupted"
    if is_main:
        print(json.dumps({"end": end, "optimizer_elements": held}), flush=True)


for job in json.loads(sys.argv[1]):
    run(**job)
