"""Medusa: several decoding heads on a frozen language model, verified as a tree, output distribution unchanged.

Importing this package costs nothing: the names below load torch and Transformers only when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import HeadsConfig as HeadsConfig
    from .heads import MedusaHeads as MedusaHeads
    from .model import MedusaModel as MedusaModel
    from .tree import DraftTree as DraftTree

__version__ = "0.1.0"

_EXPORTS = {"DraftTree": "tree", "HeadsConfig": "config", "MedusaHeads": "heads", "MedusaModel": "model"}
__all__ = ["DraftTree", "HeadsConfig", "MedusaHeads", "MedusaModel", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
