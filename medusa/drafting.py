"""Which drafter decodes: the one place that puts heads, tree, lookup and budget together, and says what is default."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal

from .acceptance_statistics import best_tree
from .budget import AdaptiveBudget, AdaptiveDrafter
from .calibration import Calibration
from .candidates import CandidateDrafter
from .drafter import Drafter
from .dynamic_tree import DynamicTreeDrafter
from .heads import Heads
from .heads_drafter import StaticTreeDrafter, check_tree
from .latency_curve import StepLatency
from .lookup import MAX_LENGTH, LookupDrafter
from .tree import DraftTree

TreeKind = Literal["dynamic", "static", "none"]

# Where there is a calibration; without one, a static tree and no lookup.
DEFAULT_TREE: TreeKind = "dynamic"
DEFAULT_LOOKUP = True
SMALLEST_LIMIT, LARGEST_LIMIT = 16, 64  # nodes that an adaptive step may draft


def make_drafter(
    heads: Heads,
    saved_tree: DraftTree,
    calibration: Calibration | None,
    *,
    tree: TreeKind | None = None,
    lookup: bool | None = None,
    budget: int | None = None,
) -> Drafter:
    """A new drafter, which follows the rows of one engine.

    tree: "dynamic" grows one in each step, "static" drafts `saved_tree` (with a budget: the best one of that size),
    "none" leaves the heads out. lookup: add n-gram matches. budget: nodes a step, root included, always drafted where
    there are so many candidates; None lets each step choose by the calibration's latencies, and a static tree without
    lookup be drafted whole. None for all of them is the default: see `DEFAULT_TREE`.
    Raises ValueError for a tree that does not fit the heads, or for what needs a calibration where there is none.
    """
    check_tree(heads, saved_tree)
    tree = tree or (DEFAULT_TREE if calibration else "static")
    lookup = (DEFAULT_LOOKUP and calibration is not None) if lookup is None else lookup
    if budget is not None and budget < 1:
        raise ValueError(f"budget is {budget}, expected at least 1 node, the root")
    if tree == "static" and not lookup:
        return StaticTreeDrafter(heads, _static_tree(saved_tree, calibration, budget))
    limit = budget or _limit(calibration)
    inner: CandidateDrafter | None = None
    if tree == "dynamic":
        temperatures = calibration.temperatures if calibration else None
        latency = calibration.latency if calibration and budget is None else None
        inner = DynamicTreeDrafter(heads, limit, temperatures, smallest_chance=chance_by_rows(latency, limit))
    elif tree == "static":
        static = _static_tree(saved_tree, calibration, budget)
        chances = calibration.statistics.path_probabilities(static.node_paths) if calibration else None
        inner = StaticTreeDrafter(heads, static, chances)
    drafter = LookupDrafter(inner, max_nodes=limit) if lookup else inner
    if drafter is None:
        raise ValueError('drafter: got tree "none" without lookup, expected one of them; use RootDrafter to not draft')
    if budget is not None:
        return drafter
    assert calibration is not None  # `_limit` has seen to it
    return AdaptiveDrafter(drafter, AdaptiveBudget(calibration.latency))


def _static_tree(saved: DraftTree, calibration: Calibration | None, budget: int | None) -> DraftTree:
    if budget is None:
        return saved
    if calibration is None:
        raise ValueError(
            f"drafter: got a budget of {budget} nodes for a static tree without a calibration, expected the saved tree "
            "as it is; run `medusa calibrate` to compute trees of other sizes"
        )
    return best_tree(calibration.statistics, budget)


def _limit(calibration: Calibration | None) -> int:
    if calibration is None:
        raise ValueError(
            "drafter: got no budget and no calibration to choose one by, expected either; run `medusa calibrate`"
        )
    return node_limit(calibration.latency_curve, calibration.tree.num_nodes)


def node_limit(latency_curve: Mapping[int, float], num_static_nodes: int) -> int:
    """Most nodes that an adaptive step may draft: heads are asked below all of them, so it is kept near what pays,
    twice the best static tree, and room for lookup's branch where nodes are that cheap."""
    wanted = max(SMALLEST_LIMIT, 2 * num_static_nodes, MAX_LENGTH + 1)
    return max(1, min(wanted, LARGEST_LIMIT, max(latency_curve)))


def chance_by_rows(latency: StepLatency | None, limit: int) -> Callable[[int], float]:
    """`smallest_chance` by number of rows; 0 without a latency."""
    return functools.cache(lambda num_rows: smallest_chance(latency, num_rows, limit) if latency else 0.0)


def smallest_chance(latency: StepLatency, num_rows: int, limit: int) -> float:
    """Chance of a node that pays about half of what a node costs, up to `limit` nodes a row, in steps of one token:
    far enough below what is drafted to leave the choice free."""
    single = latency.forward(num_rows, 1)
    slope = (latency.forward(num_rows, limit) - single) / max(limit - 1, 1)
    return max(0.0, 0.5 * slope / single)
