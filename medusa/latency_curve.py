"""Seconds of a step by its number of tokens and rows, as measured at some sizes: what lies between and beyond them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchLatency:
    """Steps of several rows at once. curve: seconds by number of tokens a row, 1 among them. propose_seconds: what
    proposing for all of them takes."""

    curve: dict[int, float]
    propose_seconds: float


@dataclass(frozen=True)
class StepLatency:
    """Seconds of a step of any size.

    curve: a forward of one row by number of tokens, 1 among them. propose_seconds: what a step with candidates takes
    besides. by_rows: the same for more rows, where it was measured; without, B rows of N tokens are taken to cost what
    B x N tokens of one row do.
    """

    curve: dict[int, float]
    propose_seconds: float = 0.0
    by_rows: dict[int, BatchLatency] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("curve", "by_rows"):
            object.__setattr__(self, name, dict(sorted(getattr(self, name).items())))

    def forward(self, num_rows: int, num_tokens: int) -> float:
        """num_tokens: of each row."""
        if not self.by_rows:
            return latency_at(self.curve, num_rows * num_tokens)
        at_rows = {rows: latency_at(batch.curve, num_tokens) for rows, batch in self.by_rows.items()}
        return latency_at({1: latency_at(self.curve, num_tokens)} | at_rows, num_rows)

    def propose(self, num_rows: int) -> float:
        if not self.by_rows:
            return self.propose_seconds
        at_rows = {rows: batch.propose_seconds for rows, batch in self.by_rows.items()}
        return latency_at({1: self.propose_seconds} | at_rows, num_rows)


def interpolate_latency(curve: Mapping[int, float], num_tokens: int) -> float:
    """Seconds at `num_tokens`, on the straight line between the measured neighbours. curve: sorted by tokens."""
    sizes = list(curve)
    assert sizes[0] <= num_tokens <= sizes[-1], (sizes, num_tokens)
    right = bisect_left(sizes, num_tokens)
    if sizes[right] == num_tokens:
        return curve[num_tokens]
    low, high = sizes[right - 1], sizes[right]
    return curve[low] + (curve[high] - curve[low]) * (num_tokens - low) / (high - low)


def latency_at(curve: Mapping[int, float], num_tokens: int) -> float:
    """Like `interpolate_latency`, and beyond the largest measured size on the last segment's line, but never less than
    at that size; with one size only, in proportion."""
    *others, last = curve
    if num_tokens <= last:
        return interpolate_latency(curve, num_tokens)
    if not others:
        return curve[last] * num_tokens / last
    slope = (curve[last] - curve[others[-1]]) / (last - others[-1])
    return curve[last] + max(slope, 0.0) * (num_tokens - last)


def check_latency(curve: Mapping[int, float], propose_seconds: float) -> None:
    """Raises ValueError for a curve without 1 token, and for times that are none."""
    if 1 not in curve:
        raise ValueError(f"latency curve: measured at {sorted(curve)} tokens, but c(N) needs 1 token; measure it too")
    for tokens, seconds in curve.items():
        if tokens < 1 or not 0 < seconds < float("inf"):
            raise ValueError(
                f"latency curve: {tokens} tokens take {seconds} s, expected a positive time; measure again"
            )
    if not 0 <= propose_seconds < float("inf"):
        raise ValueError(f"propose_seconds is {propose_seconds}, expected 0 or a positive time; measure again")
