"""c(N): what a forward of N tokens costs on this machine, and c(N, B), a step of B rows of N nodes, measured as the
decoding loop runs them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa.base_model import BaseModel
from medusa.draft import NO_TOKEN, Draft
from medusa.drafter import Drafter

from .decode import DecodeState, decode_step, prefill

SIZES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
CONTEXT = 200
ROUNDS = 15
BATCHES = (4, 8, 16)  # rows
BATCH_SIZES = (1, 2, 4, 8, 16)  # nodes a row
BATCH_ROUNDS = 7


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


class ChainDrafter(Drafter):
    """Chains of `num_nodes`, of which nothing is ever accepted."""

    max_nodes = max(BATCH_SIZES)
    num_nodes = 1

    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        tokens = torch.full((len(root), self.num_nodes), NO_TOKEN, device=root.device)
        tokens[:, 0] = root
        return Draft.of_parents(tokens, torch.arange(-1, self.num_nodes - 1, device=root.device).expand_as(tokens))


class BatchMeter:
    """Times whole steps of B rows of N nodes, for each B of `BATCHES` and N of `BATCH_SIZES`, behind about `context`
    cached tokens, rows being of different lengths as they are in a batch. Nothing is proposed, and nothing
    accepted."""

    def __init__(self, base_model: BaseModel, *, context: int = CONTEXT) -> None:
        steps = (BATCH_ROUNDS + 1) * len(BATCHES) * len(BATCH_SIZES)
        context = min(context, base_model.max_positions - steps - max(BATCH_SIZES))
        num_rows = max(BATCHES)
        if context < num_rows:
            raise ValueError(f"latency: {steps} steps do not fit the model's context of {base_model.max_positions}")
        self._base_model, self._drafter = base_model, ChainDrafter()
        self._state = DecodeState.empty(base_model, self._drafter, max_rows=num_rows, capacity=context + steps)
        hidden = prefill(base_model, self._state, 0, [n % base_model.vocab_size for n in range(context)])[-1:]
        for row in range(num_rows):
            self._state.move_row(0, row)
            self._state.cache.lengths[row] -= row
        self._root, self._hidden = torch.ones(num_rows, dtype=torch.int64, device=hidden.device), hidden
        self._seconds: dict[tuple[int, int], list[float]] = {(b, n): [] for b in BATCHES for n in BATCH_SIZES}
        self._round()  # warm up

    def round(self) -> None:
        for size, seconds in self._round().items():
            self._seconds[size].append(seconds)

    def curves(self) -> dict[int, dict[int, float]]:
        """Median seconds by number of rows, by nodes a row."""
        return {b: {n: statistics.median(self._seconds[b, n]) for n in BATCH_SIZES} for b in BATCHES}

    def _round(self) -> dict[tuple[int, int], float]:
        return {size: self._step(*size) for size in self._seconds}

    def _step(self, num_rows: int, num_nodes: int) -> float:
        self._state.root, self._state.hidden = self._root[:num_rows], self._hidden.expand(num_rows, -1)
        self._drafter.num_nodes = num_nodes
        start = time.perf_counter()
        decode_step(self._base_model, self._state)
        _wait(self._base_model)
        return time.perf_counter() - start


@torch.inference_mode()
def measure_propose(
    base_model: BaseModel, drafter: Drafter, roots: Tensor, states: Tensor, *, num_rows: int = 1, rounds: int = 25
) -> float:
    """Median seconds that the drafter takes for `num_rows` rows, with real text's tokens and states, int64 [n] and
    [n, D], in turns."""
    times = []
    for number in range(rounds):
        taken = (number * num_rows + torch.arange(num_rows, device=roots.device)) % len(roots)
        root, hidden = roots[taken], states[taken]
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
