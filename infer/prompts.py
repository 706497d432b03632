"""Prompt files: JSONL, one `{"id", "category", "turns": [str, ...]}` a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PromptRecord:
    id: str
    turns: list[str]
    category: str | None = None


def read_prompts(path: Path, *, limit: int | None = None) -> list[PromptRecord]:
    """Raises ValueError with file and line for anything that is not a prompt record, and for a repeated id."""
    if not path.is_file():
        raise ValueError(f'prompts: {path} is no file; expected JSONL lines like {{"turns": ["What is gravity?"]}}')
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    records = [_parse(f"{path}:{i}", line, i) for i, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise ValueError(f"prompts: {path} holds no prompt; expected at least one line")
    seen: set[str] = set()
    for record in records:
        if record.id in seen:
            raise ValueError(f"prompts: {path} has the id {record.id!r} twice; ids must be unique")
        seen.add(record.id)
    return records[:limit]


def _parse(where: str, line: str, number: int) -> PromptRecord:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one object a line") from error
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f'{where}: expected "turns" to be a list of at least one text, got {turns!r}')
    category = record.get("category")
    return PromptRecord(str(record.get("id", number)), turns, str(category) if category is not None else None)
