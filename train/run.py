"""A training run from its config: load the base and the data, make heads, continue what is there, train, save.

Writes a heads directory: `config.json`, `heads.safetensors`, and `training/` with the resolved config, a record of how
it was run, metrics, a summary, and the checkpoint that an interrupted run continues from. What a run is made of:
prepare.py.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from medusa.adapter import ADAPTER_FOLDER
from medusa.base_model import BaseModel
from medusa.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterReference,
    BaseReference,
    HeadsInfo,
    save_heads,
    write_atomically,
)
from medusa.fingerprint import tensors_fingerprint
from medusa.progress import StageProgress

from .config import TrainConfig, load_config
from .dataset import load_data
from .distributed import Processes, frozen_tensors, lost_peer_advice, start_processes
from .evaluation import restore_best
from .faults import memory_advice
from .forward_speed import choose_throughput
from .joint import merge_saved
from .lock import claim_folder
from .loop import train_loop
from .prepare import Folders, load_base, load_plain_base, prepare, resolve_dtype, say
from .record import record_start
from .source import hidden_source
from .step import Run
from .trackers import TRACKER_DIR, check_trackers, tracking

MERGED_FOLDER = "merged"

__all__ = ["TrainResult", "load_config", "resolve_dtype", "train"]


@dataclass(frozen=True)
class TrainResult:
    """`tokens` and `labels` trained on, over all epochs; `seconds` of training alone; `features_seconds` before it.
    `held_out`: loss and accuracy per head (see metrics.py), None without held-out data. `mfu`, `share_of_forward` (None
    where not known) and `peak_memory_bytes` (of the last start): see throughput.py."""

    heads_dir: str
    steps: int
    tokens: int
    labels: int
    empty_steps: int
    seconds: float
    features_seconds: float
    tokens_per_second: float
    stop_reason: str
    held_out: dict[str, Any] | None
    mfu: float | None = None
    share_of_forward: float | None = None
    peak_memory_bytes: int | None = None


def train(config: TrainConfig, console: Console | None = None) -> TrainResult:
    """Trains heads as `config` says, or continues, or returns what is finished there. `console` None: silent.

    Raises ValueError for what a user can set right, TrainingInterrupted after SIGINT or SIGTERM, NonFiniteLoss.
    """
    check_trackers(config.train.trackers)
    folders = Folders(Path(config.train.output_dir))
    processes = start_processes(config.train.trackers, folders.training / TRACKER_DIR)
    claim = claim_folder(folders.training) if processes.is_main else nullcontext()
    with claim, lost_peer_advice(processes):
        return _train(config, processes, folders, console if processes.is_main else None)


def _train(config: TrainConfig, processes: Processes, folders: Folders, console: Console | None) -> TrainResult:
    config = resolve_dtype(config, processes.device)
    _check_places(folders)
    base, reference = load_base(config, processes)
    data = load_data(config.data, base.tokenizer, folders.tokens, processes.is_main, console)
    run = prepare(config, processes, base, reference, data, folders, console)
    if run.state.counters.stop_reason and all(path.exists() for path in _outputs(config, folders)):
        say(console, f"finished already: {folders.heads}; delete it or set another train.output_dir to train anew")
        return _read_result(folders.summary)
    record = record_start(run, asdict(reference), data.statistics, folders.training)
    processes.shard_base(base)
    before = tensors_fingerprint(frozen_tensors(base.model))
    if processes.world_size > 1:
        say(console, f"processes      {processes.world_size}, {processes.describe(base)}")
    with tracking(processes, config, record) as trackers:
        if run.metrics:
            run.metrics.also = trackers.log
        began = time.perf_counter()
        with memory_advice("computing hidden states"):
            run.source = hidden_source(run, base, folders, console)
        features_seconds = time.perf_counter() - began
        with memory_advice("training"):
            run.throughput = choose_throughput(run, base, console)
            with StageProgress("Training heads", 1.0, console) as bar:
                run.report = bar.update
                train_loop(run)
    held_out, counters = restore_best(run), run.state.counters
    if held_out and counters.best_step != counters.step:
        say(console, f"keeping the heads of step {counters.best_step}: no later ones had a higher tau")
    if tensors_fingerprint(frozen_tensors(base.model)) != before:
        raise RuntimeError(f"base model {base.name!r} changed during training; no heads were written. This is a bug")
    result = _result(run, folders, features_seconds, held_out)
    if processes.is_main:
        _write(run, base, reference, folders, result)
    processes.barrier()
    return result


def _check_places(folders: Folders) -> None:
    for path in (folders.heads / ADAPTER_FOLDER, folders.heads / MERGED_FOLDER):
        if path.is_file():
            raise ValueError(f"{path}: got a file, expected a directory or nothing there; remove it")


def _outputs(config: TrainConfig, folders: Folders) -> list[Path]:
    """What a finished run has written."""
    names = [CONFIG_FILE, WEIGHTS_FILE]
    if config.joint.rank:
        names += [ADAPTER_FOLDER, *([MERGED_FOLDER] if config.joint.save_merged else [])]
    return [folders.summary, *(folders.heads / name for name in names)]


def _read_result(path: Path) -> TrainResult:
    try:
        return TrainResult(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: got no summary of a run ({error}), expected what training wrote; delete it and run again"
        ) from error


def _write(run: Run, base: BaseModel, reference: BaseReference, folders: Folders, result: TrainResult) -> None:
    """The heads directory, and nothing left in it that only training needed."""
    adapter = _write_adapter(run, base, folders) if run.state.adapter else None
    dtype = run.config.heads.save_dtype
    save_heads(folders.heads, run.state.heads, HeadsInfo(reference, adapter=adapter), getattr(torch, dtype))
    text = json.dumps(asdict(result), indent=2) + "\n"
    write_atomically({folders.summary: lambda file: file.write_text(text, encoding="utf-8")})
    shutil.rmtree(folders.tokens, ignore_errors=True)
    if not run.config.train.keep_hidden_states:
        shutil.rmtree(folders.features, ignore_errors=True)


def _write_adapter(run: Run, base: BaseModel, folders: Folders) -> AdapterReference:
    config, adapter, folder = run.config, run.state.adapter, folders.heads / ADAPTER_FOLDER
    assert adapter is not None
    adapter.save(folder)
    adapter.detach()
    # A base in 4 bits stays as it is: heads and adapter are for the one in full precision.
    plain = load_plain_base(config, "cpu") if config.model.quantization else base
    return merge_saved(plain, folder, folders.heads / MERGED_FOLDER if config.joint.save_merged else None)


def _result(run: Run, folders: Folders, features_seconds: float, held_out: dict[str, Any] | None) -> TrainResult:
    counters = run.state.counters
    assert counters.stop_reason is not None
    return TrainResult(
        heads_dir=str(folders.heads),
        steps=counters.step,
        tokens=counters.tokens,
        labels=counters.labels,
        empty_steps=counters.empty_steps,
        seconds=counters.seconds,
        features_seconds=features_seconds,
        stop_reason=counters.stop_reason,
        held_out=held_out,
        **run.throughput.measures(counters.tokens, counters.labels, counters.seconds),
    )
