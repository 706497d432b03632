"""`medusa calibrate`: measure acceptance and c(N) here and now, and choose the tree that makes decoding fastest."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from medusa.calibration import Calibration, choose_tree
from medusa.heads_drafter import StaticTreeDrafter
from medusa.model import MedusaModel
from medusa.tree import DraftTree

from .evaluate import LabelledText, evaluate_with_progress
from .latency import ROUNDS, measure_latency, measure_propose
from .machine import describe_machine
from .progress import token_progress


def calibrate(model: MedusaModel, texts: Sequence[LabelledText], console: Console) -> Calibration:
    """The tree is chosen on every other conversation and its tau reported on the rest, so that it is not flattered.

    Raises ValueError for fewer than two conversations, or such without answers long enough to count.
    """
    if len(texts) < 2:
        raise ValueError(f"calibrate: got {len(texts)} conversation(s), expected at least 2, half of them to check on")
    parts = [evaluate_with_progress(model, half, console).statistics for half in (texts[::2], texts[1::2])]
    with token_progress(console, "c(N)", ROUNDS, "rounds") as progress:
        curve = measure_latency(model.base, on_round=lambda: progress.advance(1))
    drafter = StaticTreeDrafter(model.heads, DraftTree.cartesian([8] + [1] * (model.heads.config.num_heads - 1)))
    propose = measure_propose(model.base, drafter)
    return choose_tree(parts[0], curve, propose_seconds=propose, held_out=parts[1], machine=describe_machine())
