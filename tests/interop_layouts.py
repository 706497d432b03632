"""Heads of every layout for the tiny base, as directories, with a tree; random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from medusa.base_model import BaseModel
from medusa.calibration import AcceptanceStatistics, choose_tree
from medusa.checkpoint import BaseReference, HeadsInfo, save_heads
from medusa.conditioned_heads import make_heads
from medusa.config import HeadsConfig
from medusa.fingerprint import fingerprint

NUM_HEADS = 3

LAYOUTS: dict[str, dict[str, Any]] = {
    "medusa, shared lm_head": {},
    "medusa, own lm_heads": {"lm_head": "own"},
    "medusa, 2 layers, shared lm_head": {"num_layers": 2},
    "medusa, 2 layers, own lm_heads": {"num_layers": 2, "lm_head": "own"},
    "medusa, shared lm_head, pruned vocabulary": {"draft": 64},
    "medusa, own lm_heads, pruned vocabulary": {"draft": 64, "lm_head": "own"},
    "markov": {"design": "markov"},
    "hydra": {"design": "hydra"},
    "medusa with fused layers": {"fused": (1,)},
}


def write_heads(
    folder: Path,
    base: BaseModel,
    *,
    design: Any = "medusa",
    num_heads: int = NUM_HEADS,
    num_layers: int = 1,
    lm_head: Any = "shared",
    draft: int | None = None,
    fused: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    tree: bool = True,
    adapter: Any = None,
) -> Path:
    """Returns `folder`."""
    config = HeadsConfig(
        num_heads, num_layers, base.hidden_size, base.vocab_size, lm_head, draft,
        design, 4 if design == "markov" else None, fused,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    ids = None if draft is None else torch.randperm(base.vocab_size, generator=generator)[:draft].sort().values
    heads = make_heads(config, ids)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    save_heads(folder, heads.to(dtype), HeadsInfo(BaseReference(base.name, fingerprint(base.model)), adapter=adapter))
    if tree:
        save_tree(folder, num_heads)
    return folder


def save_tree(folder: Path, num_heads: int = NUM_HEADS, max_nodes: int = 8) -> None:
    statistics = AcceptanceStatistics(num_heads, 4)
    ranks = torch.randint(0, 5, (200, num_heads), generator=torch.Generator().manual_seed(2))
    statistics.update(ranks)
    choose_tree(statistics, {1: 1.0, max_nodes: 1.01}, machine={"cpu": "a test"}).save(folder / "tree.json")
