"""Head design x tree x lookup: tau, c(N), tokens a second and efficiency of each, on the same prompts in one run.

    python scripts/ablate_decoding.py --heads runs/demo-medusa runs/demo-markov heads/smollm2-135m-instruct \
        --prompts mt_bench.jsonl --json results/decoding.json

Every heads directory needs the `tree.json` that `medusa calibrate` writes. For each, all ways of drafting take turns
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
from medusa.infer.methods import StockModel
from medusa.infer.prompts import read_prompts
from medusa.model import MedusaModel

METHODS = ("ar", "medusa-static", "medusa-static-lookup", "medusa-dynamic", "medusa", "lookup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="first so many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    prompts, console, report = read_prompts(options.prompts, limit=options.limit), Console(), {}
    table = Table(box=MARKDOWN)
    for column in ("heads", "design", "method", "tau", "N", "c(N)", "tokens/s", "vs hf", "efficiency"):
        table.add_column(column)
    for folder in options.heads:
        model = MedusaModel.from_pretrained(folder)
        stock = StockModel.load(model.base, model.adapter)
        settings = {"methods": options.methods, "max_new_tokens": options.max_new_tokens, "console": console}
        result = bench(model, stock, prompts, **settings)
        report[folder.name] = {"design": model.heads.config.to_dict()} | result.to_dict()
        add_rows(table, folder.name, model.heads.config.design, result)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(table)


def add_rows(table: Table, name: str, design: str, result: BenchResult) -> None:
    for method, tally in result.tallies.items():
        drafts = method not in ("hf", "hf-lookup", "ar")
        numbers: list[Any] = [f"{tally.mean_acceptance_length:.2f}"]
        numbers += [f"{tally.mean_num_nodes:.1f}", f"{result.cost(tally.mean_num_nodes):.2f}"] if drafts else ["", ""]
        numbers += [f"{tally.tokens_per_second:.1f}", f"{result.speedup(method, 'hf'):.2f}x"]
        table.add_row(name, design, method, *numbers, f"{result.efficiency(method):.2f}" if drafts else "")


if __name__ == "__main__":
    main()
