"""What a run has left in `output_dir/training`, finished or not, read for `medusa inspect run`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from .lock import is_held
from .metrics import read_metrics
from .record import CONFIG_FILE, RECORD_FILE, RunRecord, read_record

Record = dict[str, Any]
# What must be in a record of metrics to be shown; others are left out.
REQUIRED = {
    "train": {"loss", "head_top1", "tokens", "labels", "seconds", "tokens_per_second"},
    "eval": {"head_loss", "head_top1", "tau_chain", "tau_16_nodes"},
}
SPEEDS = ("tokens_per_second", "mfu", "share_of_forward", "peak_memory_bytes")


@dataclass(frozen=True)
class RunReport:
    """`train`, `evaluations`: records of metrics.jsonl, in order of steps. `checkpoint`: counters of the state that
    training would continue from, None without one. `summary`: None until the run has ended."""

    folder: Path
    config: dict[str, Any]
    record: RunRecord | None
    train: list[Record]
    evaluations: list[Record]
    checkpoint: dict[str, Any] | None
    summary: dict[str, Any] | None
    is_running: bool

    @property
    def best(self) -> Record | None:
        """The evaluation with the highest tau, whose heads are kept: of equal ones the last."""
        return max(reversed(self.evaluations), key=lambda record: record["tau_16_nodes"], default=None)

    @property
    def status(self) -> str:
        if self.summary:
            return f"finished: {self.summary['stop_reason']}"
        if self.is_running:
            return "running"
        if self.checkpoint:
            return f"unfinished; goes on from step {self.checkpoint['step']:,} where it is started again"
        return "unfinished; no checkpoint, so it would begin again"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for a file: of training the first and last records, of evaluations every one."""
        last = self.train[-1] if self.train else {}
        return {
            "folder": str(self.folder),
            "status": self.status,
            "stop_reason": self.summary["stop_reason"] if self.summary else None,
            "steps": last.get("step", 0),
            "tokens": last.get("tokens", 0),
            "labels": last.get("labels", 0),
            "seconds": last.get("seconds", 0.0),
            **self.speed(),
            "first": self.train[0] if self.train else None,
            "last": last or None,
            "evaluations": self.evaluations,
            "best_step": self.best["step"] if self.best else None,
            "continues_from_step": self.checkpoint["step"] if self.checkpoint and not self.summary else None,
            "config": self.config,
            "record": asdict(self.record) if self.record else None,
        }

    def speed(self) -> dict[str, float]:
        """Those of `SPEEDS` that are known: over the whole run where it has ended, else since the line before last."""
        found = self.summary or (self.train[-1] if self.train else {})
        return {name: found[name] for name in SPEEDS if found.get(name) is not None}


def read_run(folder: Path) -> RunReport:
    """`folder`: the run's `train.output_dir`. Raises ValueError where no run is."""
    training = folder / "training"
    if not (training / CONFIG_FILE).is_file():
        got = "no such directory" if not folder.is_dir() else f"a directory without training/{CONFIG_FILE}"
        raise ValueError(f"{folder}: got {got}, expected the train.output_dir of a run of `medusa train`")
    records = [r for r in read_metrics(training / "metrics.jsonl") if r.keys() >= REQUIRED.get(r["kind"], set())]
    record_file, summary_file = training / RECORD_FILE, training / "summary.json"
    return RunReport(
        folder=folder,
        config=_mapping(training / CONFIG_FILE, yaml.safe_load),
        record=read_record(record_file) if record_file.exists() else None,
        train=[record for record in records if record["kind"] == "train"],
        evaluations=[record for record in records if record["kind"] == "eval"],
        checkpoint=_counters(training / "checkpoint.safetensors"),
        summary=_mapping(summary_file, json.loads) if summary_file.exists() else None,
        is_running=is_held(training),
    )


def _mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: got a file that cannot be read ({reason}), expected what training wrote") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a {type(content).__name__}, expected named values, as training wrote them")
    return content


def _counters(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            counters: dict[str, Any] = json.loads(file.metadata()["state"])["counters"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: got a file that is no complete checkpoint ({error}); delete it to start over"
        ) from error
    return counters
