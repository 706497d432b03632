"""Pictures of a draft tree: in the terminal, and as a PNG beside the curves that chose its size.

Only draws; everything it shows is in the `Calibration`. Needs matplotlib for the PNG (extra `plot`), rich for text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from medusa.calibration import Calibration
from medusa.dynamic_statistics import DynamicTree
from medusa.latency_curve import latency_at
from medusa.tree import DraftTree

RankPath = tuple[int, ...]
LABELLED_NODES = 40  # above that, labels in the picture would overlap
INK, FAINT = "#1f2430", "#c9ced8"
TAU, COST, SPEEDUP = "#2a6fbb", "#d1662a", "#1f8a5b"


def node_probabilities(calibration: Calibration) -> dict[RankPath, float]:
    """Chance that each node, the root () included, is accepted: its whole path comes true."""
    paths = calibration.tree.node_paths
    return {(): 1.0, **dict(zip(paths, calibration.statistics.path_probabilities(paths), strict=True))}


def draw_tree_text(drawn: Calibration | DraftTree, console: Console) -> None:
    """Print the tree, a node a line: rank path and, when calibrated, its probability; then the numbers behind it, and
    the same of the trees that are grown anew in each step."""
    tree = drawn.tree if isinstance(drawn, Calibration) else drawn
    _print_tree(tree, node_probabilities(drawn) if isinstance(drawn, Calibration) else {}, console)
    if isinstance(drawn, Calibration):
        console.print(_numbers(drawn))
        if drawn.held_out_tau is not None:
            console.print(f"tau of this tree on positions that the choice has not seen: {drawn.held_out_tau:.2f}")
        if drawn.dynamic is not None:
            _print_dynamic(drawn, drawn.dynamic, console)


def _print_tree(tree: DraftTree, probabilities: dict[RankPath, float], console: Console) -> None:
    nodes: dict[RankPath, Tree] = {(): Tree(_node_text((), probabilities), guide_style="dim")}
    for path in _siblings_by_rank(tree):
        nodes[path] = nodes[path[:-1]].add(_node_text(path, probabilities))
    console.print(nodes[()])
    console.print(f"{_count_nodes(tree)}, depth {tree.max_depth}", style="bold")


def _print_dynamic(calibration: Calibration, dynamic: DynamicTree, console: Console) -> None:
    console.rule("grown anew in each step: the nodes drafted most often", characters="-")
    _print_tree(dynamic.typical, {}, console)
    temperatures = ", ".join(f"{temperature:.2f}" for temperature in calibration.temperatures)
    console.print(f"temperatures of the heads: {temperatures}", highlight=False)
    table = Table(title="unseen positions, all steps with N nodes", title_justify="left", header_style="bold")
    for heading in ("nodes N", "tau promised", "tau kept", "c(N)", "speedup"):
        table.add_column(heading, justify="right")
    for num_nodes, (promised, kept) in enumerate(zip(dynamic.promised, dynamic.kept, strict=True), start=1):
        if num_nodes & (num_nodes - 1) == 0 or num_nodes == len(dynamic.kept):
            seconds = latency_at(calibration.latency_curve, num_nodes)
            cost = seconds / calibration.latency_curve[1]
            speedup = kept * calibration.latency_curve[1] / (seconds + calibration.propose_seconds)
            numbers = (promised, kept, cost, speedup if num_nodes > 1 else 1.0)
            table.add_row(str(num_nodes), *(f"{number:.2f}" for number in numbers))
    console.print(table)
    console.print(
        f"each step choosing its N: {dynamic.num_nodes:.1f} nodes on average, tau {dynamic.tau:.2f}, speedup "
        f"{dynamic.speedup:.2f}",
        highlight=False,
    )


def _count_nodes(tree: DraftTree) -> str:
    return f"{tree.num_nodes} nodes" if tree.num_nodes > 1 else "1 node, the root: nothing is drafted"


def _siblings_by_rank(tree: DraftTree) -> list[RankPath]:
    return sorted(tree.node_paths)


def _node_text(path: RankPath, probabilities: dict[RankPath, float]) -> Text:
    text = Text("root" if not path else ".".join(str(rank) for rank in path), style="bold" if not path else "")
    if path in probabilities and path:
        probability = probabilities[path]
        style = "green" if probability >= 0.2 else "yellow" if probability >= 0.05 else "dim"
        text.append(f"  {probability:.1%} ", style=style)
        text.append("━" * max(1, round(30 * probability)), style=style)
    return text


def _numbers(calibration: Calibration) -> Table:
    """Sizes 1, 2, 4, ... and the chosen one, with tau, c(N) and their quotient."""
    table = Table(title="what the size was chosen from", title_justify="left", header_style="bold")
    for heading in ("nodes N", "tau(N)", "c(N)", "speedup"):
        table.add_column(heading, justify="right")
    for candidate in calibration.candidates:
        is_chosen = candidate == calibration.chosen
        if is_chosen or candidate.num_nodes & (candidate.num_nodes - 1) == 0 or candidate is calibration.candidates[-1]:
            numbers = (candidate.tau, candidate.cost, candidate.speedup)
            label = f"{'chosen > ' if is_chosen else ''}{candidate.num_nodes}"
            table.add_row(label, *(f"{number:.2f}" for number in numbers), style="bold green" if is_chosen else None)
    return table


def draw_tree_png(calibration: Calibration, path: Path) -> Path:
    """Write a two-panel PNG: the tree, and tau(N), c(N) and speedup against N. Raises ValueError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing a PNG needs matplotlib; pip install 'medusa-decoding[plot]'") from error

    num_leaves = len(calibration.tree.paths)
    figure = Figure(figsize=(13, max(5.5, min(14.0, 1.2 + 0.27 * num_leaves))), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _draw_nodes(figure, left, calibration)
    _draw_curves(right, calibration)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def layout_nodes(tree: DraftTree) -> dict[RankPath, tuple[float, float]]:
    """(x, y) of each node, root included: x its depth, leaves on rows 0, -1, ..., a parent amid its children."""
    children: dict[RankPath, list[RankPath]] = {(): []}
    for path in _siblings_by_rank(tree):
        children[path] = []
        children[path[:-1]].append(path)
    places: dict[RankPath, tuple[float, float]] = {}
    row = 0.0
    for path in _leaves_first(children):
        below = children[path]
        if below:
            y = (places[below[0]][1] + places[below[-1]][1]) / 2
        else:
            y, row = row, row - 1
        places[path] = (float(len(path)), y)
    return places


def _leaves_first(children: dict[RankPath, list[RankPath]], path: RankPath = ()) -> list[RankPath]:
    order = [node for child in children[path] for node in _leaves_first(children, child)]
    return [*order, path]


def _draw_nodes(figure: Any, axes: Any, calibration: Calibration) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    probabilities = node_probabilities(calibration)
    lowest = min(0.1, max(min(probabilities.values()), 1e-4))
    norm = LogNorm(vmin=lowest, vmax=1.0)
    # The palest end of the map would vanish on white.
    colours = LinearSegmentedColormap.from_list("nodes", colormaps["YlGnBu"](range(70, 256)))
    places = layout_nodes(calibration.tree)
    for path, place in places.items():
        probability = max(probabilities[path], lowest)
        if path:
            _draw_edge(axes, places[path[:-1]], place, colours(norm(probability)), probability)
        labelled = len(places) <= LABELLED_NODES
        size = (150 if labelled else 60) + 250 * probability
        axes.scatter(*place, s=size, color=[colours(norm(probability))], edgecolor="white", linewidth=1.2, zorder=2)
        if path and labelled:
            is_leaf = not any(other[:-1] == path for other in places if other)
            _label_node(axes, place, path[-1], probabilities[path], is_leaf, norm(probability) > 0.55)
    _style_tree_panel(axes, calibration.tree)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, location="bottom", shrink=0.5, aspect=40, pad=0.02)
    bar.set_label("chance that the node is accepted; number in a node: rank of the guess", color=INK, fontsize=9)
    ticks = [tick for tick in (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0) if tick >= lowest]
    bar.set_ticks(ticks, labels=[f"{100 * tick:g}%" for tick in ticks], minor=False)
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def _draw_edge(
    axes: Any, start: tuple[float, float], end: tuple[float, float], colour: Any, probability: float
) -> None:
    middle = (start[0] + end[0]) / 2
    xs, ys = _smooth(start, (middle, start[1]), (middle, end[1]), end)
    axes.plot(xs, ys, color=colour, linewidth=0.8 + 7 * probability**0.7, solid_capstyle="round", zorder=1)


def _label_node(
    axes: Any, place: tuple[float, float], rank: int, probability: float, is_leaf: bool, on_dark: bool
) -> None:
    from matplotlib.patheffects import withStroke

    shade = "white" if on_dark else INK
    axes.text(*place, str(rank), ha="center", va="center_baseline", fontsize=7.5, color=shade, zorder=4)
    # Beside a leaf there is room; over an inner node the edges to its children pass on the right.
    offset, align = ((11, 0), ("left", "center_baseline")) if is_leaf else ((0, 11), ("center", "bottom"))
    axes.annotate(
        f"{probability:.1%}", place, offset, textcoords="offset points", ha=align[0], va=align[1], fontsize=7.5,
        color=INK, zorder=3, path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )  # fmt: skip


def _style_tree_panel(axes: Any, tree: DraftTree) -> None:
    axes.set_xlim(-0.35, tree.max_depth + 0.55)
    axes.set_xticks(range(tree.max_depth + 1), ["root", *(f"head {head}" for head in range(tree.max_depth))])
    axes.set_yticks([])
    axes.margins(y=0.08)
    for side in ("left", "right", "top", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    axes.set_title(f"Draft tree: {_count_nodes(tree)}", loc="left", color=INK, fontsize=12)


def _smooth(*points: tuple[float, float]) -> tuple[list[float], list[float]]:
    """A cubic Bezier through its four control points, as 24 x and y values."""
    steps = [i / 23 for i in range(24)]
    weights = [((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3) for t in steps]
    xs = [sum(w * point[0] for w, point in zip(row, points, strict=True)) for row in weights]
    ys = [sum(w * point[1] for w, point in zip(row, points, strict=True)) for row in weights]
    return xs, ys


def _draw_curves(axes: Any, calibration: Calibration) -> None:
    candidates, chosen = calibration.candidates, calibration.chosen
    sizes = [candidate.num_nodes for candidate in candidates]
    curves = (
        ("tau(N), tokens a step", TAU, [candidate.tau for candidate in candidates]),
        ("c(N), cost of a step", COST, [candidate.cost for candidate in candidates]),
        ("speedup: tau / (c + proposing)", SPEEDUP, [candidate.speedup for candidate in candidates]),
    )
    if calibration.dynamic is not None:
        kept = calibration.dynamic.kept
        label = "tau(N) of trees grown anew in each step"
        axes.plot(range(1, len(kept) + 1), kept, color=TAU, linewidth=1.5, linestyle=(0, (2, 2)), label=label)
    for label, colour, values in curves:
        axes.plot(sizes, values, color=colour, linewidth=2.2, label=label, marker="o" if len(sizes) == 1 else None)
    single = calibration.latency_curve[1]
    measured = [(n, s / single) for n, s in calibration.latency_curve.items() if n <= sizes[-1]]
    axes.scatter(*zip(*measured, strict=True), s=26, color=COST, zorder=3, label="c(N), measured here")
    axes.axhline(1.0, color=FAINT, linewidth=1, zorder=0)
    axes.axvline(chosen.num_nodes, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.scatter([chosen.num_nodes], [chosen.speedup], s=70, color=SPEEDUP, edgecolor="white", linewidth=1.5, zorder=4)
    # A cost far above every gain would press the other curves flat.
    gain = max(
        *(candidate.tau for candidate in candidates), *(calibration.dynamic.kept if calibration.dynamic else ()), 1
    )
    axes.set_ylim(0, min(max(gain, *(candidate.cost for candidate in candidates)), 1.5 * gain) * 1.08)
    found = f"Chosen: N = {chosen.num_nodes}, tau {chosen.tau:.2f}, c {chosen.cost:.2f}, speedup {chosen.speedup:.2f}"
    if calibration.held_out_tau is not None:
        found += f"\ntau on positions that the choice has not seen: {calibration.held_out_tau:.2f}"
    axes.set_title(found, loc="left", color=INK, fontsize=11)
    axes.set_xlabel("tokens in one forward, N (root included)", color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, fontsize=9.5, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
