"""Which recipe makes the heads that are accepted most: the same data, tokens and order, one run an arm.

    python scripts/ablate.py --config configs/train/quickstart.yaml --test runs/test.jsonl --out runs/ablation \
        --json results/ablation.json --set data.limit=500 \
        --arm plain heads.num_layers=1 --arm distillation loss.objective=distillation

The first arm is what the others are compared with. The base's hidden states are computed once, for the first run, and
linked into the others. Each run's heads are judged on `--test`, conversations that none has seen: tau of a chain and of
the best 16-node tree, simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from medusa.base_model import load_base_model
from medusa.checkpoint import load_heads
from medusa.infer.evaluate import evaluate
from medusa.infer.machine import describe_machine
from medusa.train.config import load_config
from medusa.train.dataset import build_dataset
from medusa.train.run import train

CACHED = ["train.cache_hidden_states=true", "train.keep_hidden_states=true"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--test", required=True, help="conversations for the judgement")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--json", type=Path, required=True, help="file for the table")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING", help="settings of all runs")
    parser.add_argument("--arm", nargs="+", action="append", required=True, metavar="NAME", help="and its settings")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    features: Path | None = None
    for name, *settings in options.arm:
        folder = options.out / name
        if features and not (folder / "training" / "features").exists():
            shutil.copytree(features, folder / "training" / "features", copy_function=os.link)
        overrides = [*options.set, *settings, f"train.output_dir={folder}", *CACHED]
        result = train(load_config(options.config, overrides), Console())
        features = features or folder / "training" / "features"
        speed = round(result.tokens_per_second)
        rows[name] = {"settings": settings, "steps": result.steps, "tokens_per_second": speed}
        rows[name] |= judge(folder, options.test)
        print_row(name, rows[name], rows[options.arm[0][0]])
        report = {"machine": describe_machine(), "config": options.config, "settings": options.set, "arms": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def judge(folder: Path, test: str) -> dict[str, Any]:
    heads, info = load_heads(folder)
    base = load_base_model(info.base_model.name)
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    return evaluate(base, heads, build_dataset(test, base.tokenizer, 1024).examples).to_dict()


def print_row(name: str, row: dict[str, Any], first: dict[str, Any]) -> None:
    gain = row["tau_16_nodes"] / first["tau_16_nodes"] - 1
    top1 = " ".join(f"{head['top1']:.3f}" for head in row["accuracy"])
    print(
        f"{name:15} chain {row['tau_chain']:.3f}, 16 nodes {row['tau_16_nodes']:.3f} ({gain:+.1%}), top 1 {top1}",
        flush=True,
    )


if __name__ == "__main__":
    main()
