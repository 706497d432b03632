"""`medusa inspect heads`: what a heads directory holds."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from medusa.adapter import ADAPTER_FOLDER
from medusa.calibration import Calibration
from medusa.checkpoint import load_heads


def show_heads(folder: Path, console: Console) -> None:
    """Print design, base model, tensors, tree and training summary. Raises ValueError for a damaged directory."""
    heads, info = load_heads(folder)
    config, base = heads.config, info.base_model
    width = config.draft_vocab_size or config.vocab_size
    rows = [
        ("base model", f"{base.name}{f' at {base.revision}' if base.revision else ''}"),
        ("fingerprint", base.fingerprint[:16]),
        ("heads", f"{config.num_heads}, {config.num_layers} residual block(s) each, hidden size {config.hidden_size}"),
        ("projection", f"{config.lm_head} lm_head, {width:,} of {config.vocab_size:,} tokens"),
        ("parameters", f"{sum(parameter.numel() for parameter in heads.parameters()):,}, {_short(heads.dtype)}"),
        ("tree", _tree(folder / info.tree)),
    ]
    if info.adapter:
        rows.insert(2, ("adapter", f"LoRA in {ADAPTER_FOLDER}/ (Medusa-2), {info.adapter.fingerprint[:16]}"))
    rows += _training(folder / "training" / "summary.json")
    for name, value in rows:
        console.print(f"{name:<14} {value}", highlight=False, markup=False)
    table = Table(box=None)
    for column in ("tensor", "shape", "dtype", "norm"):
        table.add_column(column)
    for name, tensor in heads.state_dict().items():
        norm = f"{tensor.float().norm():.3f}" if tensor.is_floating_point() else ""
        table.add_row(name, str(list(tensor.shape)), _short(tensor.dtype), norm)
    console.print(table)


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _tree(path: Path) -> str:
    if not path.exists():
        return "none yet; run `medusa calibrate`"
    calibration = Calibration.load(path)
    chosen = calibration.chosen
    return f"{chosen.num_nodes} nodes, depth {calibration.tree.max_depth}, tau {chosen.tau:.2f}, c(N) {chosen.cost:.2f}"


def _training(path: Path) -> list[tuple[str, str]]:
    if not path.exists():
        return []
    summary = json.loads(path.read_text(encoding="utf-8"))
    trained = f"{summary['steps']:,} steps, {summary['tokens']:,} tokens, {summary['tokens_per_second']:,.0f} tokens/s"
    rows = [("trained", trained)]
    if held_out := summary.get("held_out"):
        rows.append(("top-1 by head", ", ".join(f"{share:.1%}" for share in held_out["head_top1"])))
    return rows
