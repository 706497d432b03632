"""c(N): what a forward of N tokens costs on this machine, measured as the decoding loop runs it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from medusa.base_model import BaseModel
from medusa.drafter import Drafter

SIZES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
CONTEXT = 200
ROUNDS = 15


class LatencyMeter:
    """Times forwards of each of `sizes` tokens, with logits and their argmax, batch 1, behind `context` cached tokens.

    Raises ValueError where context and the largest size pass the model's context length.
    """

    def __init__(self, base_model: BaseModel, sizes: Sequence[int] = SIZES, *, context: int = CONTEXT) -> None:
        context = min(context, base_model.max_positions - max(sizes))
        if context < 1:
            raise ValueError(
                f"latency: {max(sizes)} tokens do not fit the model's context of {base_model.max_positions}"
            )
        self._forward = _prefilled(base_model, context, max(sizes))
        self._seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for size in sizes:  # warm up
            self._forward(size)

    def round(self) -> None:
        """Every size once, so that a drift of the machine's speed falls on all of them."""
        for size, seconds in self._seconds.items():
            start = time.perf_counter()
            self._forward(size)
            seconds.append(time.perf_counter() - start)

    def curve(self) -> dict[int, float]:
        """Median seconds over the rounds, by number of tokens."""
        return {size: statistics.median(seconds) for size, seconds in self._seconds.items()}


def measure_latency(
    base_model: BaseModel, rounds: int = ROUNDS, *, on_round: Callable[[], None] = lambda: None
) -> dict[int, float]:
    """The curve over `SIZES`; smaller where the model's context is."""
    meter = LatencyMeter(base_model, [size for size in SIZES if size < base_model.max_positions])
    for _ in range(rounds):
        meter.round()
        on_round()
    return meter.curve()


@torch.inference_mode()
def measure_propose(base_model: BaseModel, drafter: Drafter, rounds: int = 25) -> float:
    """Median seconds that the drafter takes for one row."""
    root = torch.ones(1, dtype=torch.int64, device=base_model.device)
    hidden = torch.randn(1, base_model.state_size, device=base_model.device, dtype=base_model.dtype)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        drafter.propose(root, hidden)
        _wait(base_model)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _prefilled(base_model: BaseModel, context: int, room: int) -> Callable[[int], None]:
    cache, row = base_model.new_cache(1, context + room), slice(0, 1)

    @torch.inference_mode()
    def forward(size: int) -> None:
        ids = torch.arange(size, device=base_model.device)[None] % base_model.vocab_size
        positions = (int(cache.lengths[0]) + torch.arange(size, device=base_model.device))[None]
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        hidden = base_model.forward(ids, positions, mask, cache, row)
        base_model.logits(hidden).argmax(dim=-1)
        _wait(base_model)

    forward(context)
    with torch.inference_mode():
        cache.commit(row, torch.arange(context)[None], torch.tensor([context]))
    return forward


def _wait(base_model: BaseModel) -> None:
    if base_model.device.type == "cuda":
        torch.cuda.synchronize()
