"""Throughput of a full batch with speculation against without, by how many requests run at once.

    python scripts/bench_batching.py --heads heads/smollm2-135m-instruct --prompts data/prompts.jsonl

Two engines answer the same prompts, greedily, keeping the same number of requests in flight; one drafts as is the
heads' default, one drafts nothing. They take turns step by step, so that a drift of the machine's speed falls on both.
Steps with an empty place do not count: once no request waits any more, rows that drafted well leave early.
The heads directory needs the `tree.json` that `medusa calibrate` writes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from medusa.drafter import Drafter, RootDrafter
from medusa.infer.engine import Engine
from medusa.infer.generation import make_requests
from medusa.infer.machine import describe_machine
from medusa.infer.prompts import read_prompts
from medusa.infer.request import Request
from medusa.model import MedusaModel

WARM_UP_TOKENS = 4


@dataclass
class Arm:
    """One engine with its requests, and what its steps with every place taken gave and took."""

    engine: Engine
    requests: list[Request]
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_acceptance_length(self) -> float:
        steps = sum(request.stats.num_steps for request in self.requests)
        return sum(request.stats.num_tokens - 1 for request in self.requests) / steps

    def step(self) -> None:
        num_places = len(self.engine.waiting) + len(self.engine.running) + len(self.engine.admissions)
        start = time.perf_counter()
        pieces = self.engine.step()
        if num_places >= self.engine.max_rows:
            self.seconds += time.perf_counter() - start
            self.num_tokens += sum(len(piece.token_ids) for _, piece in pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16], help="requests at once")
    parser.add_argument("--requests", type=int, default=2, help="for each place, so many requests one after another")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, console = MedusaModel.from_pretrained(options.heads), Console()
    prompts = [record.turns[0] for record in read_prompts(options.prompts)]
    table = Table(box=MARKDOWN)
    for column in ("at once", "without, tokens/s", "with, tokens/s", "ratio", "tau"):
        table.add_column(column, justify="right")
    report: dict[str, Any] = {"machine": describe_machine(), "max_new_tokens": options.max_new_tokens, "runs": {}}
    for concurrency in options.concurrency:
        chosen = [prompts[n % len(prompts)] for n in range(concurrency * options.requests)]
        without, drafting = measure(model, chosen, concurrency, options.max_new_tokens)
        ratio = drafting.tokens_per_second / without.tokens_per_second
        report["runs"][str(concurrency)] = {
            "without": without.tokens_per_second,
            "with": drafting.tokens_per_second,
            "ratio": ratio,
            "mean_acceptance_length": drafting.mean_acceptance_length,
            "num_different": sum(
                a.token_ids != b.token_ids for a, b in zip(without.requests, drafting.requests, strict=True)
            ),
        }
        rates = [f"{arm.tokens_per_second:.1f}" for arm in (without, drafting)]
        table.add_row(str(concurrency), *rates, f"{ratio:.2f}x", f"{drafting.mean_acceptance_length:.2f}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(model: MedusaModel, prompts: Sequence[str], concurrency: int, max_new_tokens: int) -> tuple[Arm, Arm]:
    """The same prompts without and with drafting."""
    arms = []
    for drafter in (RootDrafter(), model.drafter()):
        warm_up(model, drafter, prompts, concurrency)
        requests = make_requests(model.base, prompts, max_new_tokens=max_new_tokens)
        engine = Engine(model.base, drafter, max_rows=concurrency, capacity=max(r.capacity for r in requests))
        for request in requests:
            engine.submit(request)
        arms.append(Arm(engine, requests))
    turn = 0
    while any(arm.engine.has_work for arm in arms):
        arm = arms[turn % 2]
        turn += 1
        if arm.engine.has_work:
            arm.step()
    return arms[0], arms[1]


def warm_up(model: MedusaModel, drafter: Drafter, prompts: Sequence[str], concurrency: int) -> None:
    requests = make_requests(model.base, prompts[:concurrency], max_new_tokens=WARM_UP_TOKENS)
    engine = Engine(model.base, drafter, max_rows=concurrency, capacity=max(r.capacity for r in requests))
    for _ in engine.run(requests):
        pass


if __name__ == "__main__":
    main()
