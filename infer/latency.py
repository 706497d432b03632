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


def measure_latency(
    base_model: BaseModel,
    sizes: Sequence[int] = SIZES,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    on_round: Callable[[int], None] | None = None,
) -> dict[int, float]:
    """Seconds of one forward with logits and their argmax, median of `rounds`, by number of tokens (batch 1).

    context: tokens already in the cache. Sizes take turns within each round, so that a drift of the machine's speed
    falls on all of them.
    """
    context = min(context, base_model.max_positions - max(sizes))
    if context < 1:
        raise ValueError(f"latency: {max(sizes)} tokens do not fit the model's context of {base_model.max_positions}")
    times: dict[int, list[float]] = {size: [] for size in sizes}
    forward = _prefilled(base_model, context, max(sizes))
    for round_number in range(rounds + 1):
        for size in sizes:
            start = time.perf_counter()
            forward(size)
            if round_number:  # the first one warms up
                times[size].append(time.perf_counter() - start)
        if on_round:
            on_round(round_number)
    return {size: statistics.median(seconds) for size, seconds in times.items()}


@torch.inference_mode()
def measure_propose(base_model: BaseModel, drafter: Drafter, rounds: int = 25) -> float:
    """Median seconds that the drafter takes for one row."""
    root = torch.ones(1, dtype=torch.int64, device=base_model.device)
    hidden = torch.randn(1, base_model.hidden_size, device=base_model.device, dtype=base_model.dtype)
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
