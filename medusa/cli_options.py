"""Options that commands share, and where what they print and write goes. Loads nothing heavy."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class OnBadRecord(str, Enum):
    error = "error"
    skip = "skip"


Base = Annotated[str, typer.Option(help="Base model: a directory or a Hub name.", show_default=False)]
BaseOverride = Annotated[str | None, typer.Option("--base", help="Base model, where it is not as the heads name it.")]
Heads = Annotated[Path, typer.Option(help="Heads directory, as `medusa train` writes it.", show_default=False)]
Data = Annotated[
    list[str],
    typer.Option("--data", help="Conversations: JSONL (.xz, .gz) or Hub name; repeatable.", show_default=False),
]
MaxLength = Annotated[int, typer.Option(help="Tokens kept of a conversation.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first so many.")]
BadRecord = Annotated[OnBadRecord, typer.Option(help="What a broken record does.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Type of the base model's weights.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the base model.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")]


def open_console() -> Console:
    """Also quietens what the libraries print when nobody watches."""
    from rich.console import Console
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return Console()


def write_json(path: Path | None, content: Any) -> None:
    if path is None:
        return
    import json

    from .checkpoint import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically({path: lambda file: file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")})
    print(f"numbers: {path}")
