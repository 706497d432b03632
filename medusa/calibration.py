"""The draft tree that pays on this machine: measured acceptance against the measured cost of verifying N nodes.

    speedup(N) = tau(N) / c(N),   c(N) = latency of an N-token forward / latency of a 1-token forward

`choose_tree` is the mathematics; measuring is the caller's. A `Calibration` is saved as `tree.json` beside the heads
with the numbers it came from. The tree can come out as only its root: speculation that does not pay is left off.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .acceptance_statistics import AcceptanceStatistics, best_tree, ranked_paths, tree_family, true_ranks
from .dynamic_statistics import DynamicTree
from .latency_curve import BatchLatency, StepLatency, check_latency, interpolate_latency
from .tree import DraftTree

__all__ = ["AcceptanceStatistics", "Calibration", "Candidate", "best_tree", "choose_tree", "tree_family", "true_ranks"]

SCHEMA_VERSION = 3
MAX_SAVED_PATHS = 4096


@dataclass(frozen=True)
class Candidate:
    """The best tree of one size: N nodes, tau tokens a step, `cost` = c(N), `speedup` over autoregressive steps."""

    num_nodes: int
    tau: float
    cost: float
    speedup: float


@dataclass(frozen=True)
class Calibration:
    """A chosen tree with the numbers behind it. `latency_curve`: seconds of a forward by number of tokens. `by_rows`:
    steps of several rows, by their number.

    `held_out_tau`: tau of the chosen tree on positions that the choice has not seen; None when there were none.
    `temperatures`: one a head, for the probabilities of dynamic trees. `dynamic`: how these do on the positions that
    the choice has not seen. Files of schema version 1 have neither; they load with temperatures of 1 and None; those
    before version 3 have no `by_rows`.
    """

    tree: DraftTree
    statistics: AcceptanceStatistics
    latency_curve: dict[int, float]
    candidates: tuple[Candidate, ...]
    propose_seconds: float = 0.0
    held_out_tau: float | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    temperatures: tuple[float, ...] = ()
    dynamic: DynamicTree | None = None
    by_rows: dict[int, BatchLatency] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperatures:
            object.__setattr__(self, "temperatures", (1.0,) * self.statistics.num_heads)

    @property
    def latency(self) -> StepLatency:
        return StepLatency(self.latency_curve, self.propose_seconds, self.by_rows)

    @property
    def chosen(self) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.num_nodes == self.tree.num_nodes)

    def to_json(self) -> str:
        return json.dumps(_to_dict(self), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "calibration") -> Calibration:
        """Raises ValueError naming `source` and the field for anything that `to_json` would not have written."""
        try:
            return _from_file(_File.model_validate_json(text))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ValueError(f"{source}: {where}: {first['msg']}; {_FIX}") from error
        except ValueError as error:
            raise ValueError(f"{source}: {error}; {_FIX}") from error

    def save(self, path: Path) -> None:
        """Write all of the file or none of it."""
        path = Path(path)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp's files are private
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Raises ValueError when the file is missing, is not text or is not a calibration."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); {_FIX}") from error
        return cls.from_json(text, source=str(path))


_FIX = "run `medusa calibrate` to write it anew"


def choose_tree(
    statistics: AcceptanceStatistics,
    latency_curve: Mapping[int, float],
    *,
    propose_seconds: float = 0.0,
    held_out: AcceptanceStatistics | None = None,
    machine: Mapping[str, Any] | None = None,
    temperatures: Sequence[float] = (),
    dynamic: DynamicTree | None = None,
    by_rows: Mapping[int, BatchLatency] | None = None,
) -> Calibration:
    """The tree, of every size up to the largest measured, that maximises tau(N) / c(N); the smaller one on a tie.

    latency_curve: seconds of one forward by number of tokens, 1 among them; straight lines in between. It is used as
    measured, not forced to rise: some kernels really are slower at 2 tokens than at 4. propose_seconds: what a step
    with drafts costs beyond the forward (heads, top-k); a root-only step does not pay it. held_out: positions that the
    choice must not see, to report an unflattered tau. Raises ValueError for a curve without 1 or with bad numbers.
    """
    check_latency(latency_curve, propose_seconds)
    curve = dict(sorted(latency_curve.items()))
    single, total = curve[1], max(statistics.num_positions, 1)
    candidates, tau = [Candidate(1, 1.0, 1.0, 1.0)], 1.0
    for num_nodes, (_, count) in enumerate(ranked_paths(statistics)[: max(curve) - 1], start=2):
        tau += count / total
        seconds = interpolate_latency(curve, num_nodes)
        speedup = tau * single / (seconds + propose_seconds)
        candidates.append(Candidate(num_nodes, tau, seconds / single, speedup))
    chosen = max(candidates, key=lambda candidate: (candidate.speedup, -candidate.num_nodes))
    tree = best_tree(statistics, chosen.num_nodes)
    held_out_tau = held_out.expected_length(tree) if held_out is not None else None
    return Calibration(
        tree, statistics, curve, tuple(candidates), propose_seconds, held_out_tau, dict(machine or {}),
        tuple(temperatures), dynamic, dict(by_rows or {}),
    )  # fmt: skip


_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Statistics(_Strict):
    num_heads: Annotated[int, Field(ge=1)]
    max_rank: Annotated[int, Field(ge=1)]
    rank_counts: list[list[_Count]]
    matches: list[tuple[list[_Count], _Count]]


class _Candidate(_Strict):
    num_nodes: Annotated[int, Field(ge=1)]
    tau: _Positive
    cost: _Positive
    speedup: _Positive


class _Dynamic(_Strict):
    promised: list[_Positive]
    kept: list[_Positive]
    typical: list[list[int]]
    num_nodes: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    tau: _Positive
    speedup: _Positive


class _BatchLatency(_Strict):
    latency_curve: dict[str, _Positive]
    propose_seconds: _Seconds


class _File(_Strict):
    schema_version: Literal[1, 2, 3]
    tree: list[list[int]]
    tau: _Positive
    held_out_tau: _Positive | None
    propose_seconds: _Seconds
    latency_curve: dict[str, _Positive]
    candidates: list[_Candidate]
    machine: dict[str, Any]
    statistics: _Statistics
    temperatures: list[_Positive] = []
    dynamic: _Dynamic | None = None
    by_rows: dict[str, _BatchLatency] = {}


def _to_dict(calibration: Calibration) -> dict[str, Any]:
    statistics = calibration.statistics.compact(MAX_SAVED_PATHS)
    return {
        "schema_version": SCHEMA_VERSION,
        "tree": calibration.tree.to_list(),
        "tau": calibration.chosen.tau,
        "held_out_tau": calibration.held_out_tau,
        "propose_seconds": calibration.propose_seconds,
        "latency_curve": _with_string_keys(calibration.latency_curve),
        "candidates": [asdict(candidate) for candidate in calibration.candidates],
        "machine": calibration.machine,
        "temperatures": list(calibration.temperatures),
        "dynamic": _dynamic_to_dict(calibration.dynamic),
        "by_rows": {
            str(rows): {"latency_curve": _with_string_keys(batch.curve), "propose_seconds": batch.propose_seconds}
            for rows, batch in calibration.by_rows.items()
        },
        "statistics": {
            "num_heads": statistics.num_heads,
            "max_rank": statistics.max_rank,
            "rank_counts": statistics.rank_counts,
            "matches": [[list(path), count] for path, count in sorted(statistics.matches.items())],
        },
    }


def _with_string_keys(curve: Mapping[int, float]) -> dict[str, float]:
    return {str(tokens): seconds for tokens, seconds in curve.items()}


def _dynamic_to_dict(dynamic: DynamicTree | None) -> dict[str, Any] | None:
    if dynamic is None:
        return None
    return {**asdict(dynamic), "typical": dynamic.typical.to_list()}


def _from_file(file: _File) -> Calibration:
    statistics = _read_statistics(file.statistics)
    tree = DraftTree.from_paths(file.tree, max_depth=statistics.num_heads)
    if tree.max_width > statistics.max_rank:
        raise ValueError(
            f"tree uses rank {tree.max_width - 1}, but only ranks below {statistics.max_rank} were measured"
        )
    curve = _read_curve(file.latency_curve, file.propose_seconds)
    candidates = tuple(Candidate(**candidate.model_dump()) for candidate in file.candidates)
    if tree.num_nodes not in {candidate.num_nodes for candidate in candidates}:
        raise ValueError(f"tree has {tree.num_nodes} nodes, but no candidate of that size is listed")
    if len(file.temperatures) not in (0, statistics.num_heads) or (file.schema_version > 1 and not file.temperatures):
        raise ValueError(f"temperatures has {len(file.temperatures)} numbers, expected one for each head")
    return Calibration(
        tree, statistics, curve, candidates, file.propose_seconds, file.held_out_tau, file.machine,
        tuple(file.temperatures), _read_dynamic(file.dynamic, statistics.num_heads), _read_by_rows(file.by_rows),
    )  # fmt: skip


def _read_curve(saved: Mapping[str, float], propose_seconds: float) -> dict[int, float]:
    if any(not tokens.isdecimal() for tokens in saved):
        raise ValueError(f"latency_curve has the keys {list(saved)}, expected numbers of tokens")
    curve = {int(tokens): seconds for tokens, seconds in saved.items()}
    check_latency(curve, propose_seconds)
    return curve


def _read_by_rows(saved: Mapping[str, _BatchLatency]) -> dict[int, BatchLatency]:
    if any(not rows.isdecimal() or int(rows) < 2 for rows in saved):
        raise ValueError(f"by_rows has the keys {list(saved)}, expected numbers of rows, 2 or more")
    return {
        int(rows): BatchLatency(_read_curve(batch.latency_curve, batch.propose_seconds), batch.propose_seconds)
        for rows, batch in saved.items()
    }


def _read_dynamic(saved: _Dynamic | None, num_heads: int) -> DynamicTree | None:
    if saved is None:
        return None
    typical = DraftTree.from_paths(saved.typical, max_depth=num_heads)
    promised, kept = tuple(saved.promised), tuple(saved.kept)
    return DynamicTree(promised, kept, typical, saved.num_nodes, saved.tau, saved.speedup)


def _read_statistics(saved: _Statistics) -> AcceptanceStatistics:
    heads, ranks = saved.num_heads, saved.max_rank
    if len(saved.rank_counts) != heads or any(len(row) != ranks + 1 for row in saved.rank_counts):
        raise ValueError(f"statistics.rank_counts is not {heads} rows of {ranks + 1} counts")
    totals = {sum(row) for row in saved.rank_counts} | {sum(count for _, count in saved.matches)}
    if len(totals) != 1:
        raise ValueError(f"statistics count different numbers of positions: {sorted(totals)}")
    for path, _ in saved.matches:
        if len(path) > heads or any(rank >= ranks for rank in path):
            raise ValueError(f"statistics.matches has the path {path}, expected at most {heads} ranks below {ranks}")
    matches = Counter({tuple(path): count for path, count in saved.matches})
    if len(matches) != len(saved.matches):
        raise ValueError("statistics.matches lists a path twice")
    return AcceptanceStatistics(heads, ranks, matches, saved.rank_counts)
