"""prompt -> prefill -> propose -> verify -> accept -> commit -> stream, and the tools that measure it.

The names below load torch only when first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generate import GenerationResult as GenerationResult
    from .generate import generate as generate
    from .generate import stream as stream
    from .request import Piece as Piece

_MODULES = {"generate": "generate", "stream": "generate", "GenerationResult": "generate", "Piece": "request"}
__all__ = ["GenerationResult", "Piece", "generate", "stream"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # `generate` is also a submodule's name: the function must stay the one that is found
    return value
