"""Head design x tree x lookup: tau, c(N), tokens a second and efficiency of each, on the same prompts in one run.

    python scripts/ablate_decoding.py --heads runs/demo-medusa runs/demo-markov heads/smollm2-135m-instruct \
        --prompts mt_bench.jsonl --json results/decoding.json

Every heads directory needs the `tree.json` that `medusa calibrate` writes. All ways of drafting of all heads take turns
prompt by prompt with stock `generate` and with this engine drafting nothing; tokens are compared with stock's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from medusa.infer.bench import BenchResult, bench
from medusa.infer.bench_report import plot_bench
from medusa.infer.methods import Method, StockModel, make_methods
from medusa.infer.prompts import read_prompts
from medusa.model import MedusaModel
from medusa.sampling import SamplingParams

METHODS = ("medusa-static", "medusa-static-lookup", "medusa-dynamic", "medusa")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="first so many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="of each heads")
    parser.add_argument("--without-heads", nargs="*", default=["ar", "lookup"], help="methods that need no heads")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="also draw the speeds here (PNG)")
    options = parser.parse_args()
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p)
    models = {folder.name: MedusaModel.from_pretrained(folder) for folder in options.heads}
    first = next(iter(models.values()))
    stock = StockModel.load(first.base, first.adapter)
    others: dict[str, Method] = {}
    for name, model in models.items():
        methods = make_methods(model, stock, sampling)
        others |= {f"{name}: {method}": methods[method] for method in options.methods}
    prompts, console = read_prompts(options.prompts, limit=options.limit), Console()
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "console": console}
    result = bench(first, stock, prompts, methods=options.without_heads, others=others, **settings)
    designs: dict[str, str] = {name: model.heads.config.design for name, model in models.items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"designs": designs} | result.to_dict(), indent=2) + "\n", encoding="utf-8")
    Console(width=160).print(as_table(result, designs))
    if options.plot:
        plot_bench(result, options.plot)


def as_table(result: BenchResult, designs: dict[str, str]) -> Table:
    table = Table(box=MARKDOWN)
    for column in ("heads", "design", "method", "tau", "N", "c(N)", "drafting", "tokens/s", "vs hf", "efficiency"):
        table.add_column(column)
    for name, tally in result.tallies.items():
        heads, _, method = name.rpartition(": ")
        cells = ["", "", "", "", ""]
        if not name.startswith("hf"):
            nodes = tally.mean_num_nodes
            cells = [f"{tally.mean_acceptance_length:.2f}", f"{nodes:.1f}", f"{result.cost(nodes):.2f}"]
            cells += [f"{tally.propose_share:.0%}", f"{result.efficiency(name):.2f}"]
        speed = [f"{tally.tokens_per_second:.1f}", f"{result.speedup(name, 'hf'):.2f}x"]
        table.add_row(heads, designs.get(heads, ""), method, *cells[:4], *speed, cells[4])
    return table


if __name__ == "__main__":
    main()
