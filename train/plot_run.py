"""A run as a picture: loss and accuracy of each head over steps, and tau where there were evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from .run_report import Record, RunReport

INK, FAINT = "#1f2430", "#c9ced8"
TREE, CHAIN = "#1f8a5b", "#d1662a"
SMOOTHED_OVER = 1 / 25  # of the run: what one point of a smoothed line averages


def plot_run(report: RunReport, path: Path) -> Path:
    """Writes a PNG of two or three panels. Raises ValueError without matplotlib, and where nothing was logged yet."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing a PNG needs matplotlib; pip install 'medusa-decoding[plot]'") from error
    if not report.train:
        raise ValueError(
            f"{report.folder}: got no logged steps yet, expected some to draw; wait, or lower train.log_every"
        )
    num_panels = 3 if report.evaluations else 2
    figure = Figure(figsize=(5.2 * num_panels, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, num_panels, sharex=True)
    _draw_heads(panels[0], report, "head_loss", 1.0)
    _draw_heads(panels[1], report, "head_top1", 100.0)
    panels[0].set_title("Loss of each head", loc="left", color=INK, fontsize=11)
    panels[1].set_title("Top-1 accuracy of each head, %", loc="left", color=INK, fontsize=11)
    panels[1].set_ylim(bottom=0)
    if report.evaluations:
        _draw_tau(panels[2], report)
    for panel in panels:
        _style(panel)
    dots = "; dots: held out" if report.evaluations else ""
    figure.suptitle(
        f"{report.folder}    lines: training{dots}", x=0.01, ha="left", color=INK, fontsize=10, fontweight="bold"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and of those up to `width` // 2 before and after it; both ends are as near as they can be."""
    sums = [0.0, *accumulate(values)]
    spans = []
    for at in range(len(values)):
        reach = min(width // 2, at, len(values) - 1 - at)
        spans.append((at - reach, at + reach + 1))
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def _draw_heads(axes: Any, report: RunReport, name: str, scale: float) -> None:
    from matplotlib import colormaps

    steps = [record["step"] for record in report.train]
    width = max(1, round(len(steps) * SMOOTHED_OVER))
    num_heads = len(report.train[0][name])
    colours = colormaps["viridis"]([0.85 * head / max(num_heads - 1, 1) for head in range(num_heads)])
    for head, colour in enumerate(colours):
        values = _series(report.train, name, head, scale)
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.25 if width > 1 else 0)
        label, marker = f"head {head}", "o" if len(steps) == 1 else None
        axes.plot(steps, smoothed(values, width), color=colour, linewidth=1.8, marker=marker, label=label)
        axes.plot(
            [record["step"] for record in report.evaluations], _series(report.evaluations, name, head, scale),
            color=colour, linestyle="none", marker="o", markersize=7, markeredgecolor="white",
        )  # fmt: skip
    axes.set_xlabel("step", color=INK)


def _series(records: list[Record], name: str, head: int, scale: float) -> list[float]:
    return [scale * record[name][head] for record in records]


def _draw_tau(axes: Any, report: RunReport) -> None:
    steps = [record["step"] for record in report.evaluations]
    best = report.best
    assert best is not None
    for name, label, colour in (("tau_16_nodes", "16-node tree", TREE), ("tau_chain", "chain", CHAIN)):
        axes.plot(
            steps, [record[name] for record in report.evaluations], "o-", color=colour, linewidth=1.8, label=label
        )
    axes.scatter(
        [best["step"]], [best["tau_16_nodes"]], s=170, facecolor="none", edgecolor=INK, linewidth=1.4, zorder=4
    )
    axes.set_title(
        f"tau, held out; best {best['tau_16_nodes']:.2f} at step {best['step']:,}", loc="left", color=INK, fontsize=11
    )
    axes.set_xlabel("step", color=INK)


def _style(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, fontsize=9)
