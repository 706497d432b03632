"""Static against dynamic trees of one size, for one or more heads, on the same positions of the same text.

    python scripts/compare_trees.py --heads runs/demo-medusa runs/demo-markov heads/smollm2-135m-instruct \
        --fit runs/fit.jsonl --test runs/test.jsonl --json results/trees.json

`--fit` and `--test` are conversations that no heads have seen. On the first the static tree is chosen and the
temperatures of the dynamic one are fitted; tau on the second is simulated, every position counting as a step. Nothing
is timed. `static, hindsight` is the best static tree that could have been chosen with the test text known.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from medusa.acceptance_statistics import best_tree
from medusa.base_model import BaseModel, load_base_model
from medusa.candidates import CandidateDrafter
from medusa.checkpoint import load_heads
from medusa.draft import Draft
from medusa.dynamic_statistics import accepted_nodes
from medusa.dynamic_tree import DynamicTreeDrafter
from medusa.heads_drafter import StaticTreeDrafter
from medusa.infer.evaluate import LabelledText, evaluate, full_positions
from medusa.infer.progress import token_progress
from medusa.temperature import TemperatureFit
from medusa.train.dataset import build_dataset
from medusa.tree import DraftTree

ROWS = 64
MAX_LENGTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, nargs="+", required=True)
    parser.add_argument("--fit", required=True, help="conversations to choose the static tree and temperatures on")
    parser.add_argument("--test", required=True, help="conversations to compare on")
    parser.add_argument("--nodes", type=int, default=16, help="nodes of every tree, the root included")
    parser.add_argument("--every", type=int, default=1, help="look at every n-th position of the test")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    console, report = Console(), {"nodes": options.nodes, "every": options.every, "heads": {}}
    for folder in options.heads:
        report["heads"][folder.name] = compare(folder, options, console)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    Console(width=160).print(as_table(report["heads"]))


def compare(folder: Path, options: argparse.Namespace, console: Console) -> dict[str, float | str]:
    heads, info = load_heads(folder)
    base = load_base_model(info.base_model.name)
    base.fuse_layers(heads.config.fused_layers)
    heads = heads.to(base.dtype).requires_grad_(False).eval()
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    fit, test = (build_dataset(path, base.tokenizer, MAX_LENGTH).examples for path in (options.fit, options.test))
    num_heads = heads.config.num_heads
    fits = [TemperatureFit() for _ in range(num_heads)]
    chosen_on = evaluate(base, heads, fit, fits=fits).statistics
    seen = evaluate(base, heads, test).statistics
    drafters: dict[str, CandidateDrafter] = {
        "static": StaticTreeDrafter(heads, best_tree(chosen_on, options.nodes)),
        "static, hindsight": StaticTreeDrafter(heads, best_tree(seen, options.nodes)),
        "dynamic": DynamicTreeDrafter(heads, options.nodes, [fit.temperature for fit in fits]),
    }
    taus = simulate(base, drafters, test, num_heads, options.every, console)
    return {"design": heads.config.design, "chain": seen.expected_length(DraftTree.chain(num_heads)), **taus}


@torch.inference_mode()
def simulate(
    base: BaseModel,
    drafters: dict[str, CandidateDrafter],
    texts: Sequence[LabelledText],
    num_heads: int,
    every: int,
    console: Console,
) -> dict[str, float]:
    """tau of each drafter over the same positions."""
    kept, num_positions = dict.fromkeys(drafters, 0), 0
    with token_progress(console, "trees", len(texts), "conversations") as progress:
        for text in texts:
            ids = text.input_ids
            states = base.hidden_states(ids[None], torch.ones_like(ids[None]))[0]
            for positions in full_positions(text.loss_mask, num_heads)[::every].split(ROWS):
                truth = ids[positions[:, None] + 2 + torch.arange(num_heads)]
                num_positions += len(positions)
                for name, drafter in drafters.items():
                    draft = drafter.propose(ids[positions + 1], states[positions])
                    kept[name] += int(accepted(draft, truth))
            progress.advance(1)
    return {name: total / num_positions for name, total in kept.items()} | {"num_positions": num_positions}


def accepted(draft: Draft, truth: torch.Tensor) -> torch.Tensor:
    """Tokens that all rows' steps emit."""
    return accepted_nodes(draft, truth).sum()


def as_table(heads: dict[str, dict[str, float | str]]) -> Table:
    table = Table(box=MARKDOWN)
    columns = ("chain", "static", "static, hindsight", "dynamic")
    for column in ("heads", "design", *columns, "dynamic against static"):
        table.add_column(column)
    for name, row in heads.items():
        gain = float(row["dynamic"]) / float(row["static"]) - 1
        table.add_row(name, str(row["design"]), *(f"{row[column]:.3f}" for column in columns), f"{gain:+.1%}")
    return table


if __name__ == "__main__":
    main()
