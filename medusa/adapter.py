"""A base adapted by LoRA (Medusa-2): the peft adapter beside the heads, checked and merged into the loaded base."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import AdapterReference

ADAPTER_FOLDER = "adapter"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class MergedAdapter:
    """The adapter in `folder`, of which `reference` says which it must be."""

    folder: Path
    reference: AdapterReference

    def merge_into(self, model: Any) -> None:
        """Add it to the weights of `model`, the base that it was trained on, in place.

        Raises ValueError for an adapter that is missing or another than the heads were trained with, or without peft.
        """
        _check(self.folder, self.reference)
        merge(self.folder, model)


def merge(folder: Path, model: Any) -> None:
    """Add the adapter in `folder` to the weights of `model`, in place."""
    merged = import_peft().PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)
    assert merged is model, "peft merges in place"
    model.requires_grad_(False).eval()


def _check(folder: Path, reference: AdapterReference) -> None:
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder}: got no {name}, expected the adapter that the heads were trained with; copy the heads "
                "directory whole, or train again"
            )
    if (got := adapter_fingerprint(folder)) != reference.fingerprint:
        raise ValueError(
            f"{folder}: got an adapter of fingerprint {got[:12]}, expected {reference.fingerprint[:12]}, which the "
            "heads were trained with; copy the heads directory whole, or train again"
        )


def adapter_fingerprint(folder: Path) -> str:
    """sha256 (hex) of the adapter's weights and of its config, but for where its base lies. Raises ValueError for a
    config that is none."""
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: got broken JSON ({error}), expected a peft config; copy or train it again"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: got a {type(config).__name__}, expected a peft config; copy or train it again")
    config.pop("base_model_name_or_path", None)
    weights = (folder / ADAPTER_WEIGHTS).read_bytes()
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode() + weights).hexdigest()


def import_peft() -> Any:
    """Raises ValueError where peft is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "a base adapted by LoRA needs the package peft, got none installed; pip install 'medusa-decoding[train]'"
        ) from error
    return peft
