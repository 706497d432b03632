"""prompt -> prefill -> propose -> verify -> accept -> commit -> stream, and the tools that measure it.

The names below load torch only when first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generation import GenerationResult as GenerationResult
    from .generation import generate as generate
    from .generation import stream as stream
    from .request import Piece as Piece

_MODULES = {"generate": "generation", "stream": "generation", "GenerationResult": "generation", "Piece": "request"}
__all__ = ["GenerationResult", "Piece", "generate", "stream"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
