"""How a run's heads were made, beside its checkpoint: `training/record.json`, and `config.yaml` to run again.

The record grows by an entry with each continuation, so that a run which moved between machines or commits says so.
"""

from __future__ import annotations

import json
import platform
import secrets
import shlex
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from medusa.checkpoint import write_atomically

from .config import TrainConfig
from .data_statistics import DataStatistics
from .step import Run

RECORD_FILE, CONFIG_FILE = "record.json", "config.yaml"
REQUIRED = ("medusa-decoding", "torch", "transformers", "accelerate")
OPTIONAL = ("datasets", "peft", "deepspeed", "bitsandbytes")


@dataclass(frozen=True)
class Start:
    """A start or a continuation. `time`: ISO 8601, UTC. `step`: of the checkpoint it went on from, 0 for none.
    `git_commit`: of the repository that the working directory is in; `-dirty` behind it where files had changed."""

    time: str
    step: int
    command: str
    git_commit: str | None
    versions: dict[str, str]
    device: str
    num_processes: int


@dataclass(frozen=True)
class RunRecord:
    """`run_id`: random, kept over continuations; trackers know the run by it. `base_model`: name, revision,
    fingerprint. `data`: statistics, sources, number held out, fingerprint."""

    run_id: str
    base_model: dict[str, Any]
    data: dict[str, Any]
    starts: list[Start]


def record_start(run: Run, base_model: dict[str, Any], statistics: DataStatistics, folder: Path) -> RunRecord:
    """The record of `run` as it starts or goes on, on disk in `folder` (by the first process) before this returns."""
    data = {
        **statistics.to_dict(),
        "held_out": len(run.held_out),
        "fingerprint": run.identity["data fingerprint"],
    }
    start = this_start(run.state.counters.step, run.processes.device, run.processes.world_size)
    record = RunRecord(secrets.token_hex(4), base_model, data, [start])
    return write_record(folder, run.config, record) if run.processes.is_main else record


def this_start(step: int, device: torch.device, num_processes: int) -> Start:
    is_cuda = device.type == "cuda"
    return Start(
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        step=step,
        command=shlex.join(sys.argv),
        git_commit=git_commit(),
        versions=versions(),
        device=torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine(),
        num_processes=num_processes,
    )


def write_record(folder: Path, config: TrainConfig, record: RunRecord) -> RunRecord:
    """Writes both files into `folder`. Where `record`, of one start, continues the run recorded there, it takes over
    that one's id and earlier starts. Returns what was written.

    A record that cannot be read is set aside with a warning: it must not keep a run from going on.
    """
    path, [start] = folder / RECORD_FILE, record.starts
    before = _read_before(path) if start.step and path.exists() else None
    if before:
        record = replace(record, run_id=before.run_id, starts=[*before.starts, start])
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    content = json.dumps(asdict(record), indent=2) + "\n"
    write_atomically(
        {
            folder / CONFIG_FILE: lambda file: file.write_text(text, encoding="utf-8"),
            path: lambda file: file.write_text(content, encoding="utf-8"),
        }
    )
    return record


def read_record(path: Path) -> RunRecord:
    """Raises ValueError for a file that is no record."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        starts = [Start(**start) for start in content.pop("starts")]
        return RunRecord(**content, starts=starts)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: got a damaged file ({error}), expected a run's record; delete it") from error


def _read_before(path: Path) -> RunRecord | None:
    try:
        return read_record(path)
    except ValueError as error:
        aside = path.with_name(path.name + ".damaged")
        path.replace(aside)
        warnings.warn(f"{error}; set aside as {aside.name}, the record starts anew", stacklevel=2)
        return None


def versions() -> dict[str, str]:
    """Of Python, of what training needs, and of what it can use where that is installed."""
    found = {"python": platform.python_version()} | {name: version(name) for name in REQUIRED}
    for name in OPTIONAL:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def git_commit() -> str | None:
    """`<commit>` or `<commit>-dirty`; None outside a repository, in one without commits, and without git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
