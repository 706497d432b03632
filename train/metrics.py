"""Metrics as JSON lines, one every few steps, and what the loss's sums mean. Not here: anything on a screen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa.checkpoint import write_atomically

from .loss import LABELS, LOSS, TARGETS, TOPS


def head_metrics(sums: Tensor) -> dict[str, Any]:
    """Sums [K, NUM_SUMS] of loss.py -> per head: mean loss over labels, and accuracy over all targets.

    Targets outside the draft vocabulary count as misses, as they are in decoding. `coverage`: share of targets inside.
    """
    rows = sums.tolist()
    total = max(sum(row[TARGETS] for row in rows), 1)
    return {
        "head_loss": [row[LOSS] / max(row[LABELS], 1) for row in rows],
        **{f"head_top{top}": [row[at] / max(row[TARGETS], 1) for row in rows] for at, top in TOPS.items()},
        "coverage": sum(row[LABELS] for row in rows) / total,
    }


def base_metrics(sums: Tensor) -> dict[str, float]:
    """`base_loss`, the adapted base's own mean loss; nothing in Medusa-1."""
    total, labels = sums.tolist()
    return {"base_loss": total / labels} if labels else {}


class MetricsFile:
    """Appends JSON lines. Lines of steps after `last_step` are dropped first: the continued run writes them again."""

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= last_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically({path: lambda file: file.write_text("".join(kept), encoding="utf-8")})

    def write(self, record: dict[str, Any]) -> None:
        """On disk before it returns, so that a checkpoint written afterwards never knows of lost lines."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _complete_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]
