"""A benchmark's result for people: a table in the terminal, a picture as PNG (matplotlib, extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .bench import VERDICTS, BenchResult
from .methods import METHODS
from .ties import TIE_GAP

COLOURS = {
    "hf": "#c9ced8",
    "hf-lookup": "#8d95a5",
    "ar": "#2a6fbb",
    "medusa": "#1f8a5b",
    "medusa-static": "#9bc4ae",
    "medusa-static-lookup": "#b79a3c",
    "medusa-dynamic": "#5aa884",
    "lookup": "#d1662a",
}
INK = "#1f2430"


def print_bench(result: BenchResult, console: Console) -> None:
    how = "greedy"
    if result.is_sampled:
        how = f"temperature {result.sampling.temperature}, top-p {result.sampling.top_p}, seed {result.sampling.seed}"
    title = f"{result.num_prompts} prompts, up to {result.max_new_tokens} new tokens, {how}"
    table = Table(title=title, box=SIMPLE, padding=0)
    table.add_column("method", no_wrap=True)
    for name in ("tokens/s", "vs hf", "vs ar", "tau", "N", "draft", "eff.", "first", "same", "tie", "differ"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, method in result.to_dict()["methods"].items():
        table.add_row(
            name,
            f"{method['tokens_per_second']:.1f}",
            _ratio(method, "speedup_vs_hf"),
            _ratio(method, "speedup_vs_ar"),
            f"{method['mean_acceptance_length']:.2f}",
            f"{method['mean_num_nodes']:.1f}" if "mean_num_nodes" in method else "",
            f"{method['propose_share']:.0%}" if "propose_share" in method else "",
            f"{method['efficiency']:.2f}" if "efficiency" in method else "",
            f"{1000 * method['time_to_first_token_s']:.0f} ms",
            *_verdicts(result, name),
        )
    console.print(table)
    for name in result.tallies:
        console.print(f"{name}: {METHODS[name]}", style="dim", highlight=False)
    console.print(
        "tau: tokens per step. N: tokens that a step verifies. draft: share of the time that drafting takes. eff.: "
        "efficiency, speedup over ar by tau / c(N). "
        "first: time to the first token. "
        + (
            f"Tokens are compared with ar's, drawn with the same seed; hf draws others from the same distribution. "
            f"tie: tokens part within {TIE_GAP} of the edge of their probabilities."
            if result.is_sampled
            else f"tie: tokens part where hf's two best logits are within {TIE_GAP}."
        ),
        style="dim",
    )


def _verdicts(result: BenchResult, name: str) -> list[str]:
    """Cells, empty where a method's tokens are not compared."""
    verdicts = result.tallies[name].verdicts
    return [str(verdicts.count(verdict)) if result.is_compared(name) else "" for verdict in VERDICTS]


def _ratio(method: dict[str, Any], key: str) -> str:
    return f"{method[key]:.2f}x" if key in method else ""


def plot_bench(result: BenchResult, path: Path) -> None:
    """Tokens a second of each method, by category where prompts have one. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib; install it with `pip install medusa-decoding[plot]`") from error
    names = list(result.tallies)
    groups = {"all": result.tallies, **dict(sorted(result.by_category.items()))}
    figure = Figure(figsize=(max(5.0, 1.1 * len(groups) + 2), 3.6), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [tallies[name].tokens_per_second for tallies in groups.values()]
        places = [group + (i - (len(names) - 1) / 2) * width for group in range(len(groups))]
        colour, label = COLOURS.get(name, f"C{i}"), f"{name}: {METHODS[name]}" if name in METHODS else name
        bars = axes.bar(places, heights, width * 0.92, color=colour, label=label)
        if name not in ("hf", "hf-lookup"):
            ratios = [
                f"{height / tallies['hf'].tokens_per_second:.1f}x"
                for height, tallies in zip(heights, groups.values(), strict=True)
            ]
            axes.bar_label(bars, ratios, fontsize=7, color=INK, padding=1)
    axes.set_xticks(range(len(groups)), list(groups), rotation=20, ha="right", color=INK)
    axes.set_ylabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
