"""`medusa calibrate`: measure acceptance and c(N) here and now, and choose the tree that makes decoding fastest."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from medusa.budget import AdaptiveBudget
from medusa.calibration import Calibration, choose_tree
from medusa.drafting import node_limit, smallest_chance
from medusa.dynamic_statistics import DynamicStatistics
from medusa.dynamic_tree import DynamicTreeDrafter
from medusa.lookup import LookupDrafter
from medusa.model import MedusaModel
from medusa.temperature import TemperatureFit

from .evaluate import LabelledText, evaluate_with_progress
from .latency import ROUNDS, measure_latency, measure_propose
from .machine import describe_machine
from .progress import token_progress
from .simulate import simulate


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
    with token_progress(console, "c(N)", ROUNDS, "rounds") as progress:
        curve = measure_latency(model.base, on_round=lambda: progress.advance(1))
    limit = node_limit(curve, choose_tree(chosen_on, curve).tree.num_nodes)
    chance = smallest_chance(curve, limit)
    drafter = DynamicTreeDrafter(model.heads, limit, temperatures, smallest_chance=chance)
    propose = measure_propose(model.base, LookupDrafter(drafter, max_nodes=drafter.max_nodes))
    dynamic = DynamicStatistics(AdaptiveBudget(curve, propose))
    simulate(model.base, drafter, num_heads, texts[1::2], dynamic)
    return choose_tree(
        chosen_on,
        curve,
        propose_seconds=propose,
        held_out=held_out,
        machine=describe_machine(),
        temperatures=temperatures,
        dynamic=dynamic.summary(),
    )
