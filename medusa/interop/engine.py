"""What an engine's format module says about it: what it can express, what it loads, how what was written is checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..base_model import BaseModel
from ..calibration import Calibration
from ..checkpoint import HeadsInfo
from ..config import HeadsConfig
from ..heads import Heads
from .json_files import read_object
from .output import MAX_SHARD_BYTES
from .plain import PlainHeads, plain_heads
from .tensor_files import TensorFiles

CONFIG_FILE = "config.json"
MEDUSA_FILE = "medusa_lm_head"  # stem of the original's file
OURS = "`medusa serve`, or in vLLM medusa.interop.vllm.MedusaProposer,"


@dataclass(frozen=True)
class Source:
    """A heads directory with its base, and where it is exported to. dtype: of the tensors to be written. repo_id: of
    the Hub repository that the export is for, None where it stays."""

    folder: Path
    out: Path
    heads: Heads
    info: HeadsInfo
    base: BaseModel
    dtype: torch.dtype
    calibration: Calibration | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    repo_id: str | None = None

    @property
    def config(self) -> HeadsConfig:
        return self.heads.config

    @property
    def base_name(self) -> str:
        return self.base.name

    def plain(self, *, width: int = 1) -> PlainHeads:
        """As `plain_heads`."""
        return plain_heads(self.heads, self.base.lm_head_weight, self.dtype, width=width)


class Engine(ABC):
    """`name`: of `--to`. `versions`: which releases load the files, and how that is known."""

    name: ClassVar[str]
    title: ClassVar[str]
    versions: ClassVar[str]

    def check(self, config: HeadsConfig) -> None:
        """Raises ValueError with the reason and an alternative for heads that the engine cannot run as they are."""
        if config.design != "medusa":
            self.refuse(
                f"{config.design} heads, which look at the drafted tokens",
                f"use {OURS} or train with heads.design=medusa",
            )
        if config.fused_layers:
            self.refuse(
                "heads with fused layers, which look at the base's inner layers",
                "use `medusa serve`, or train with heads.fused_layers=[]",
            )

    def refuse(self, got: str, advice: str) -> None:
        raise ValueError(f"{self.title}: got {got}; its heads see the last hidden state alone. Instead {advice}")

    @abstractmethod
    def write(self, source: Source, folder: Path) -> list[str]:
        """The engine's files into an empty `folder`. Returns what there is to say about the conversion."""

    @abstractmethod
    def validate(self, folder: Path) -> None:
        """Reads `folder` by the engine's own rules. Raises ValueError for what it would refuse or load wrong."""

    @abstractmethod
    def serve(self, folder: str, source: Source) -> str:
        """The command that serves `folder`, for the model card."""


def medusa_config(source: Source, **more: Any) -> dict[str, Any]:
    """What the original's and several engines' config.json have in common."""
    config = source.config
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": source.base_name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": str(source.dtype).removeprefix("torch."),
        **more,
    }


def block_tensors(plain: PlainHeads, prefix: str = "") -> dict[str, torch.Tensor]:
    """The original's names of the residual blocks."""
    tensors: dict[str, torch.Tensor] = {}
    for k, head in enumerate(plain.blocks):
        for j, (weight, bias) in enumerate(head):
            tensors |= {f"{prefix}{k}.{j}.linear.weight": weight, f"{prefix}{k}.{j}.linear.bias": bias}
    return tensors


def medusa_tensors(plain: PlainHeads, prefix: str = "") -> dict[str, torch.Tensor]:
    """The same with a projection for each head."""
    projections = {f"{prefix}{k}.{plain.num_layers}.weight": plain.projection(k) for k in range(plain.num_heads)}
    return block_tensors(plain, prefix) | projections


def medusa_shapes(config: dict[str, Any], prefix: str = "", *, projections: bool = True) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a loader of the original's names asks for, by its config."""
    size, layers = config["hidden_size"], config["medusa_num_layers"]
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(config["medusa_num_heads"]):
        for j in range(layers):
            shapes |= {f"{prefix}{k}.{j}.linear.weight": (size, size), f"{prefix}{k}.{j}.linear.bias": (size,)}
        if projections:
            shapes[f"{prefix}{k}.{layers}.weight"] = (config["vocab_size"], size)
    return shapes


def check_config(folder: Path, *, needs: Iterable[str], forbids: Iterable[str] = (), title: str) -> dict[str, Any]:
    """The config.json in `folder`. Raises ValueError for keys that are missing or that the engine trips over."""
    path = folder / CONFIG_FILE
    config = read_object(path)
    for name in needs:
        if config.get(name) is None:
            raise ValueError(f"{path}: got no {name}, expected it for {title}")
    for name in forbids:
        if name in config:
            raise ValueError(f"{path}: got {name}, which {title} takes for something else; leave it out")
    return config


def check_tensors(
    files: TensorFiles, shapes: Mapping[str, tuple[int, ...]], title: str, *, others: bool = False
) -> None:
    """Raises ValueError where the tensors are not just those of `shapes`, all finite; `others` may come on top."""
    for name, shape in shapes.items():
        if name not in files:
            raise ValueError(f"{files.folder}: got no tensor {name}, expected it for {title}")
        if (got := tuple(files.floats(name).shape)) != shape:
            raise ValueError(f"{files.folder}: got tensor {name} as {list(got)}, expected {list(shape)} for {title}")
    if not others and (unknown := sorted(set(files) - set(shapes))):
        raise ValueError(f"{files.folder}: got tensor {unknown[0]}, which {title} does not load; it would be left out")
