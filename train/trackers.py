"""The numbers of metrics.jsonl on wandb, tensorboard or trackio too, through accelerate, from the first process only.

A tracker that cannot start is an error at once; one that fails later is reported once and left out: the numbers are in
metrics.jsonl all the same.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .config import TrainConfig
from .distributed import Processes
from .record import RunRecord

TRACKER_DIR = "tensorboard"  # inside output_dir/training


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(
                f"train.trackers: got {name}, which is not installed, expected installed trackers; "
                "pip install 'medusa-decoding[trackers]', or leave it out"
            )


class Trackers:
    """Sends records of metrics to trackers that have been started."""

    def __init__(self, started: Sequence[Any]) -> None:
        self._live = list(started)

    def log(self, record: dict[str, Any]) -> None:
        values = flatten(record)
        for tracker in list(self._live):
            try:
                tracker.log(values, step=record["step"])
            except Exception as error:  # whatever a third party's client raises: training is worth more
                self._drop(tracker, error)

    def finish(self) -> None:
        for tracker in list(self._live):
            try:
                tracker.finish()
            except Exception as error:
                self._drop(tracker, error)

    def _drop(self, tracker: Any, error: Exception) -> None:
        self._live.remove(tracker)
        warnings.warn(
            f"tracker {tracker.name} failed ({_first_line(error)}); training goes on without it, all numbers are in "
            "metrics.jsonl",
            stacklevel=3,
        )


@contextmanager
def tracking(processes: Processes, config: TrainConfig, record: RunRecord) -> Iterator[Trackers]:
    """Starts the trackers that the run's accelerator was made for, or continues the run that they know, and finishes
    them however training ends; on the main process only. Raises RuntimeError where one does not start."""
    step, accelerator = record.starts[-1].step, processes.accelerator
    is_tracked = bool(config.train.trackers) and processes.is_main
    if is_tracked:
        hyperparameters = None if step else flat_hyperparameters(config)
        options = tracker_options(Path(config.train.output_dir), record.run_id, step)
        try:
            accelerator.init_trackers(config.train.tracker_project, hyperparameters, options)
        except Exception as error:
            raise RuntimeError(
                f"train.trackers: {', '.join(config.train.trackers)} did not start ({_first_line(error)}); log in or "
                "set it offline (wandb: `wandb login`, or WANDB_MODE=offline), or leave it out"
            ) from error
    trackers = Trackers(accelerator.trackers if is_tracked else [])
    try:
        yield trackers
    finally:
        trackers.finish()


def tracker_options(output_dir: Path, run_id: str, step: int) -> dict[str, dict[str, Any]]:
    """What each tracker is told so that a continuation after `step` is the same run. It is called by the last two
    parts of the output directory, such as quickstart/heads."""
    name = "/".join(output_dir.resolve().parts[-2:])
    return {
        "wandb": {"name": name, "id": run_id, "resume": "allow", "dir": str(output_dir / "training")},
        "tensorboard": {"purge_step": step + 1 if step else None},
        # It knows runs by their names only.
        "trackio": {"name": f"{name}-{run_id}", "resume": "allow", "embed": False},
    }


def flatten(record: dict[str, Any]) -> dict[str, float]:
    """A record of metrics.jsonl -> {"train/loss": 1.0, "train/head_top1/0": 0.5, ...}; what is null is left out."""
    return dict(_leaves(record["kind"], {name: v for name, v in record.items() if name not in ("kind", "step")}))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(f"{name}/{key}", part)
    elif isinstance(value, list):
        yield from _leaves(name, dict(enumerate(value)))
    elif value is not None:
        yield name, value


def flat_hyperparameters(config: TrainConfig) -> dict[str, Any]:
    """{"section.key": value} of the resolved config; lists as JSON text, which all trackers take."""
    sections = config.model_dump(mode="json").items()
    flat = {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}
    return {name: json.dumps(value) if isinstance(value, (list, dict)) else value for name, value in flat.items()}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
