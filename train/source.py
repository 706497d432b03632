"""Which source of hidden states a run has: the base on every batch, or its states computed once, on disk."""

from __future__ import annotations

import json
import time

from rich.console import Console

from medusa.base_model import BaseModel
from medusa.progress import StageProgress

from .features import CachedHidden, FeatureLayout, HiddenSource, compute_features, prepare_folder
from .prepare import Folders, online_source, say
from .step import Run

IDENTITY = (
    "base fingerprint",
    "data fingerprint",
    "model.dtype",
    "model.quantization",
    "heads.num_heads",
    "heads.fused_layers",
)


def hidden_source(run: Run, base: BaseModel, folders: Folders, console: Console | None) -> HiddenSource:
    """Computes what is not on disk yet, where the config says so, each process its share."""
    config, processes = run.config, run.processes
    online = online_source(config, base)
    if not config.train.cache_hidden_states:
        return online
    layout = FeatureLayout(folders.features, run.examples, config.heads.num_heads, base.state_size, base.dtype)
    identity = json.dumps({name: run.identity[name] for name in IDENTITY}, sort_keys=True)
    if processes.is_main:
        missing = prepare_folder(layout, identity)
        say(console, f"hidden states  {missing / 1e6:,.0f} MB to compute into {folders.features}")
    processes.barrier()
    own = range(processes.rank, len(layout.shards), processes.world_size)
    forwards = layout.num_forwards(own, config.optim.batch_size)
    most_forwards = processes.largest(forwards)
    began, done, computed = time.perf_counter(), 0, 0
    with StageProgress("Hidden states", sum(layout.num_tokens(n) for n in own), console) as bar:

        def progress(tokens: int, is_new: bool) -> None:
            nonlocal done, computed
            done, computed = done + tokens, computed + tokens * is_new
            bar.update(done, f"{computed / (time.perf_counter() - began):,.0f} tokens/s")

        compute_features(layout, online, config.optim.batch_size, own, progress)
    for _ in range(most_forwards - forwards):
        online.idle()
    processes.barrier()
    return CachedHidden(layout)
