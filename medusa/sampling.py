"""How tokens are chosen: what a request may ask for, and under which acceptance rule.

`rejection` is lossless: whatever is drafted, tokens have exactly the base's distribution under these settings.
`typical` is lossy: it keeps drafted tokens that the base finds plausible, so answers are not the base's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

MIN_TEMPERATURE = 1e-4  # below, float32 logits divided by it may overflow

AcceptanceName = Literal["greedy", "rejection", "typical"]


@dataclass(frozen=True)
class SamplingParams:
    """In the order in which they work, each with the meaning that it has in Transformers:

    repetition_penalty: above 1 makes tokens of prompt and output less likely, below 1 more. presence_penalty and
    frequency_penalty (OpenAI's): taken off the logits of the output's tokens, once or as often as each occurs.
    processors: Transformers `LogitsProcessor`s, called in this order with ids [1, T] and float32 scores [1, V]. Then,
    where temperature is above 0 (0: greedy): temperature; the top_k likeliest tokens (0: all); the smallest set of
    likeliest tokens that reaches top_p; tokens at least min_p times as likely as the likeliest.
    seed: the same seed gives the same tokens, whatever is drafted and whoever shares the batch; None: a new one.
    Raises ValueError for a setting out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    processors: tuple[Callable[[Any, Any], Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "processors", tuple(self.processors))
        for name, in_range, expected in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not in_range(value):
                raise ValueError(f"{name}: got {value!r}, expected {expected}")
        if self.top_k != int(self.top_k):
            raise ValueError(f"top_k: got {self.top_k!r}, expected a whole number; 0 keeps all tokens")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ValueError(f"seed: got {self.seed!r}, expected a whole number, or None for another one every time")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed: got {self.seed}, expected one of at most 64 bits")
        for processor in self.processors:
            if not callable(processor):
                raise ValueError(
                    f"processors: got {processor!r}, expected Transformers LogitsProcessor objects, each called with "
                    "(input_ids, scores)"
                )

    @property
    def needs_context(self) -> bool:
        """Whether what was said before changes the scores."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.processors)

    @property
    def is_plain_greedy(self) -> bool:
        return self.temperature == 0 and not self.needs_context

    def without_seed(self) -> SamplingParams:
        return self if self.seed is None else replace(self, seed=None)


_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "temperature",
        lambda x: x == 0 or MIN_TEMPERATURE <= x < math.inf,
        f"0 (greedy) or a finite number from {MIN_TEMPERATURE}",
    ),
    ("top_k", lambda x: 0 <= x < math.inf, "a whole number from 0; 0 keeps all tokens"),
    ("top_p", lambda x: 0 < x <= 1, "a number above 0 and at most 1; 1 keeps all tokens"),
    ("min_p", lambda x: 0 <= x <= 1, "a number from 0 to 1; 0 keeps all tokens"),
    ("repetition_penalty", lambda x: 0 < x < math.inf, "a number above 0; 1 penalises nothing"),
    ("presence_penalty", math.isfinite, "a finite number, usually from -2 to 2; 0 penalises nothing"),
    ("frequency_penalty", math.isfinite, "a finite number, usually from -2 to 2; 0 penalises nothing"),
)

GREEDY_SAMPLING = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Typical:
    """LOSSY. Medusa's typical acceptance (section 2.3.1): a drafted token x is kept where the base's probability
    p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy of p in nats. Raises ValueError out of range."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise ValueError(f"{name}: got {value!r}, expected a number above 0 and at most 1")


def choose_acceptance(sampling: SamplingParams, acceptance: AcceptanceName | Typical | None) -> Typical | None:
    """The lossy rule where it is asked for, None for the lossless one (greedy is its case of temperature 0).

    Raises ValueError for a rule that does not fit the temperature.
    """
    if acceptance is None or acceptance == "rejection":
        return None
    if acceptance == "greedy":
        if sampling.temperature > 0:
            raise ValueError(
                f"acceptance: got greedy with temperature {sampling.temperature}, expected temperature 0; leave one out"
            )
        return None
    if acceptance == "typical" or isinstance(acceptance, Typical):
        if sampling.temperature == 0:
            raise ValueError("acceptance: got typical with temperature 0, which is greedy; give a temperature above 0")
        return acceptance if isinstance(acceptance, Typical) else Typical()
    raise ValueError(f"acceptance: got {acceptance!r}, expected greedy, rejection or typical")
