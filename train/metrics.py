"""Metrics as JSON lines, one every few steps, and what the loss's sums mean. Not here: anything on a screen."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
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
    """Appends JSON lines. Lines of steps after `last_step` are dropped first: the continued run writes them again.

    `also`: gets every record too. Damaged lines, such as a power failure leaves, are dropped with a warning.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        self.also: Callable[[dict[str, Any]], None] | None = None
        records = read_metrics(path)
        kept = [json.dumps(record) + "\n" for record in records if record["step"] <= last_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically({path: lambda file: file.write_text("".join(kept), encoding="utf-8")})

    def write(self, record: dict[str, Any]) -> None:
        """On disk before it returns, so that a checkpoint written afterwards never knows of lost lines. Raises OSError
        with the file and what to do."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                f"{self.path}: cannot be written ({error.strerror}); the last checkpoint is intact; free some space "
                "and run the same command again to continue"
            ) from error
        if self.also:
            self.also(record)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; none where there is no file. The last line may be torn, as a kill leaves
    it; any other damaged line is left out with a warning that says which."""
    if not path.exists():
        return []
    records, damaged = [], []
    *lines, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if (record := _record(line)) is None:
            damaged.append(number)
        else:
            records.append(record)
    if damaged:
        shown = ", ".join(map(str, damaged[:8])) + (", ..." if len(damaged) > 8 else "")
        warnings.warn(f"{path}: {len(damaged)} damaged line(s) left out ({shown})", stacklevel=3)
    return records


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if is_ours else None
