"""JSON from strangers: an object without repeated keys, NaN or surprises of type, of a size that makes sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

MAX_BYTES = 64_000_000  # an index of a large model takes a few


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Raises ValueError, naming `where`, for anything but one JSON object."""
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: got broken JSON ({error}), expected an object; download or make it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: got a JSON {type(content).__name__}, expected an object; download or make it again")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Of a file. Raises ValueError also for one that is too large."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path}: got {size:,} bytes, expected a JSON file of at most {MAX_BYTES:,}")
    return parse_object(path.read_bytes(), str(path))


def count(config: dict[str, Any], name: str, where: Path) -> int | None:
    """A whole number of at least 1 that `config` may give. Raises ValueError for any other value."""
    value = config.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: got {name} {value!r}, expected a whole number of at least 1")
    return value


def write_object(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is there twice")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
