"""The README.md of an export: what the heads are, how they were made and how they do, as far as that is on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from .. import __version__
from .engine import Engine, Source

CARD_FILE = "README.md"


def model_card(source: Source, engine: Engine, notes: list[str]) -> str:
    """Markdown with the front matter that model hubs read. What is not known is not said."""
    name = source.repo_id or source.out.name
    front = {"library_name": "medusa-decoding", "tags": ["medusa", "speculative-decoding"]}
    if not Path(source.base_name).exists():
        front["base_model"] = source.base_name
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=True)}---",
        f"# {name}",
        _what(source, engine),
        _bullets("Conversion", notes),
        _bullets("Training", training_facts(source.folder / "training")),
        _bullets("Accuracy", accuracy_facts(source)),
        _serve(source, engine, source.repo_id or str(source.out)),
        f"Written by medusa-decoding {__version__}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _what(source: Source, engine: Engine) -> str:
    config, base = source.config, source.info.base_model
    vocabulary = f"{config.num_draft_tokens:,} of {config.vocab_size:,} tokens"
    facts = [
        f"base model: `{source.base_name}`" + (f" at revision `{base.revision}`" if base.revision else ""),
        f"fingerprint of the base: `{base.fingerprint[:16]}`",
        f"heads: {config.num_heads} of the design {config.design}, {config.num_layers} layer(s) each, "
        f"{config.lm_head} lm_head, {vocabulary}",
        f"type: {str(source.dtype).removeprefix('torch.')}",
    ]
    if config.fused_layers:
        facts.append(f"fused layers of the base: {', '.join(map(str, config.fused_layers))}")
    if source.info.adapter:
        facts.append("the base is adapted by LoRA (Medusa-2)")
    intro = (
        "Medusa heads: they draft tokens that the base model verifies, so that it answers in fewer steps. In the files "
        f"of {engine.title}; loaded by {engine.versions}."
    )
    return intro + "\n\n" + "\n".join(f"- {fact}" for fact in facts)


def _bullets(title: str, lines: list[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def training_facts(folder: Path) -> list[str]:
    """Data and recipe out of a run's resolved config and summary, where these lie there and can be read."""
    config, summary = _read_yaml(folder / "config.yaml"), _read_yaml(folder / "summary.json")
    facts = []
    data, optim = config.get("data"), config.get("optim")
    if isinstance(data, dict) and (path := data.get("path") or data.get("sources")):
        facts.append(f"data: `{path if isinstance(path, str) else json.dumps(path, default=str)}`")
    if isinstance(optim, dict):
        said = [f"{name} {optim[name]}" for name in ("lr", "batch_size", "epochs") if optim.get(name) is not None]
        facts.append(f"recipe: {', '.join(said)}")
    if all(isinstance(summary.get(name), int) for name in ("steps", "tokens")):
        facts.append(f"{summary['steps']:,} steps, {summary['tokens']:,} tokens")
    return facts


def accuracy_facts(source: Source) -> list[str]:
    """Per head out of the run's held-out data, else out of the calibration; tau and the tree out of the latter."""
    facts = []
    held_out = _read_yaml(source.folder / "training" / "summary.json").get("held_out")
    top1 = held_out.get("head_top1") if isinstance(held_out, dict) else None
    if isinstance(top1, list) and all(isinstance(share, float) for share in top1):
        facts.append(f"first guess right, by head, on held-out training data: {_shares(top1)}")
    if source.calibration is None:
        return facts
    calibration, statistics = source.calibration, source.calibration.statistics
    if statistics.num_positions:
        shares = [row[0] / sum(row) for row in statistics.rank_counts]
        facts.append(
            f"first guess right, by head, on {statistics.num_positions:,} calibration positions: {_shares(shares)}"
        )
    tree, chosen = calibration.tree, calibration.chosen
    tau = f"tau {chosen.tau:.2f} tokens a step"
    if calibration.held_out_tau is not None:
        tau += f" ({calibration.held_out_tau:.2f} on positions that the choice has not seen)"
    facts.append(f"calibrated tree: {tree.num_nodes} nodes, depth {tree.max_depth}, {tau}")
    if machine := calibration.machine.get("cpu") or calibration.machine.get("device"):
        facts.append(f"calibrated on: {machine}")
    return facts


def _shares(shares: list[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def _serve(source: Source, engine: Engine, folder: str) -> str:
    text = f"## Serve\n\n{engine.title}: {engine.versions}.\n\n```bash\n{engine.serve(folder, source)}\n```"
    if engine.name == "hf":
        text += (
            "\n\nOther engines load other files: `medusa export --to vllm|tgi|trtllm|mlc|medusa-v1|medusa-v2` writes "
            "them, or says why it cannot."
        )
    return text


def _read_yaml(path: Path) -> dict[str, Any]:
    """Of a file that is a courtesy: what cannot be read is not known."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
