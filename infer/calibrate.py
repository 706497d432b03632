"""`medusa calibrate`: measure acceptance and c(N) here and now, and choose the tree that makes decoding fastest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console

from medusa.budget import AdaptiveBudget
from medusa.calibration import Calibration, choose_tree
from medusa.drafter import Drafter
from medusa.drafting import chance_by_rows, node_limit
from medusa.dynamic_statistics import DynamicStatistics
from medusa.dynamic_tree import DynamicTreeDrafter
from medusa.latency_curve import BatchLatency, StepLatency
from medusa.lookup import LookupDrafter
from medusa.model import MedusaModel
from medusa.temperature import TemperatureFit

from .evaluate import LabelledText, evaluate_with_progress, full_positions
from .latency import BATCH_ROUNDS, ROUNDS, BatchMeter, measure_latency, measure_propose
from .machine import describe_machine
from .progress import token_progress
from .simulate import simulate

STATES, STATES_A_TEXT = 256, 32  # positions at which proposing is timed


def calibrate(model: MedusaModel, texts: Sequence[LabelledText], console: Console) -> Calibration:
    """Tree and temperatures are chosen on every other conversation and tau reported on the rest, so that it is not
    flattered.

    Raises ValueError for fewer than two conversations, or such without answers long enough to count.
    """
    if len(texts) < 2:
        raise ValueError(f"calibrate: got {len(texts)} conversation(s), expected at least 2, half of them to check on")
    num_heads = model.heads.config.num_heads
    fits = [TemperatureFit() for _ in range(num_heads)]
    chosen_on = evaluate_with_progress(model, texts[::2], console, fits).statistics
    held_out = evaluate_with_progress(model, texts[1::2], console).statistics
    temperatures = [fit.temperature for fit in fits]
    with token_progress(console, "c(N)", ROUNDS + BATCH_ROUNDS, "rounds") as progress:
        curve = measure_latency(model.base, on_round=lambda: progress.advance(1))
        meter = BatchMeter(model.base)
        for _ in range(BATCH_ROUNDS):
            meter.round()
            progress.advance(1)
    unproposed = StepLatency(curve, by_rows={rows: BatchLatency(batch, 0.0) for rows, batch in meter.curves().items()})
    limit = node_limit(curve, choose_tree(chosen_on, curve).tree.num_nodes)
    drafter = DynamicTreeDrafter(model.heads, limit, temperatures, smallest_chance=chance_by_rows(unproposed, limit))
    latency = _with_proposing(model, LookupDrafter(drafter, max_nodes=drafter.max_nodes), unproposed, texts[1::2])
    dynamic = DynamicStatistics(AdaptiveBudget(latency))
    simulate(model.base, drafter, num_heads, texts[1::2], dynamic)
    return choose_tree(
        chosen_on,
        curve,
        propose_seconds=latency.propose_seconds,
        held_out=held_out,
        machine=describe_machine(),
        temperatures=temperatures,
        dynamic=dynamic.summary(),
        by_rows=latency.by_rows,
    )


@torch.inference_mode()
def _with_proposing(
    model: MedusaModel, drafter: Drafter, latency: StepLatency, texts: Sequence[LabelledText]
) -> StepLatency:
    """The same with what `drafter` takes, measured at answers of these texts."""
    roots, states = [], []
    for text in texts:
        ids = text.input_ids.to(model.base.device)
        positions = full_positions(text.loss_mask, model.heads.config.num_heads).to(ids.device)[:STATES_A_TEXT]
        states.append(model.base.hidden_states(ids[None], torch.ones_like(ids[None]))[0, positions])
        roots.append(ids[positions + 1])
        if sum(map(len, roots)) >= STATES:
            break
    measure = partial(measure_propose, model.base, drafter, torch.cat(roots), torch.cat(states))
    by_rows = {rows: BatchLatency(batch.curve, measure(num_rows=rows)) for rows, batch in latency.by_rows.items()}
    return StepLatency(latency.curve, measure(), by_rows)
