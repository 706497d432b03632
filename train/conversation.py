"""Conversations as they come from files or the Hub: read, checked record by record, located by file and line.

Not here: tokens. A record is checked only for what it says itself; what a chat template makes of it is chat_mask.py's.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

OnBadRecord = Literal["error", "skip"]
FILE_ENDINGS = (".jsonl", ".json", ".parquet")
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
SHAREGPT_ROLES = ROLES | {"human": "user", "gpt": "assistant", "model": "assistant"}
SKIP_HINT = "fix the record, or set data.on_bad_record to skip"


@dataclass(frozen=True)
class Conversation:
    """One record. Either `messages` ({"role", "content"} each) or exact ids are there; with both, the ids are used."""

    messages: list[dict[str, str]] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    answer_ids: list[int] | None = None
    category: str | None = None
    where: str = "?"  # FILE:LINE, for messages about it


class BadRecord(ValueError):
    """A record that cannot be trained on. `reason`: a few words to count by. `str()`: one line, with the location."""

    def __init__(self, where: str, reason: str, got: str, expected: str, fix: str = SKIP_HINT) -> None:
        super().__init__(f"{where}: got {got}, expected {expected}; {fix}")
        self.reason = reason


def read_conversations(
    sources: str | Sequence[str],
    on_bad_record: OnBadRecord = "error",
    skipped: Counter[str] | None = None,
) -> Iterator[Conversation]:
    """Conversations of files (.jsonl, .json, both also .gz or .xz; .parquet) and Hub datasets ("org/name[:split]").

    A local path wins over a Hub name. `skipped` counts reasons where `on_bad_record` is "skip". Raises BadRecord
    (a ValueError) for a bad record, ValueError for a source that cannot be read at all, even when skipping.
    """
    if on_bad_record not in ("error", "skip"):
        raise ValueError(f"data.on_bad_record is {on_bad_record!r}, expected 'error' or 'skip'")
    for _, record in read_records([sources] if isinstance(sources, str) else sources):
        if not isinstance(record, BadRecord):
            yield record
        elif on_bad_record == "error":
            raise record
        elif skipped is not None:
            skipped[record.reason] += 1


def read_records(sources: Sequence[str], streaming: bool = False) -> Iterator[tuple[int, Conversation | BadRecord]]:
    """(number of the source, a conversation or what is wrong with it), record by record, sources one after another.

    `streaming`: Hub datasets are read over the network as they are needed, not downloaded first. Raises ValueError for
    a source that cannot be read; one that is not there before any is read.
    """
    for source in sources:
        check_source(source)
    for number, source in enumerate(sources):
        is_empty = True
        for where, record in _records(source, streaming):
            is_empty = False
            try:
                parsed: Conversation | BadRecord = parse_record(record, where)
            except BadRecord as bad:
                parsed = bad
            yield number, parsed
        if is_empty:
            raise ValueError(f"{source}: got no records, expected at least one conversation; check how it was made")


# ---- one record


def parse_record(record: Any, where: str) -> Conversation:
    """Checks one record: bytes of a JSON line, or its value. Raises BadRecord."""
    if isinstance(record, bytes):
        record = _parse_line(record, where)
    if not isinstance(record, dict):
        raise BadRecord(where, "not an object", _kind(record), 'a JSON object such as {"messages": [...]}')
    category = record.get("category")
    category = category if isinstance(category, str) else None
    prompt_ids, answer_ids = (_token_ids(record, key, where) for key in ("prompt_ids", "answer_ids"))
    if prompt_ids is not None and answer_ids is not None:
        return Conversation([], prompt_ids, answer_ids, category, where)
    if prompt_ids is not None or answer_ids is not None:
        raise BadRecord(where, "ids incomplete", "one of prompt_ids and answer_ids", "both or neither")
    return Conversation(_messages(record, where), category=category, where=where)


def _parse_line(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8"))
    except UnicodeDecodeError as error:
        got = f"the byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise BadRecord(where, "not UTF-8", got, "UTF-8 text") from None
    except json.JSONDecodeError as error:
        got = f"broken JSON ({error.msg} at column {error.colno})"
        raise BadRecord(where, "broken JSON", got, "one JSON object a line") from None
    except RecursionError:
        raise BadRecord(where, "broken JSON", "JSON nested too deeply", "one JSON object a line") from None


def _token_ids(record: dict[str, Any], key: str, where: str) -> list[int] | None:
    ids = record.get(key)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise BadRecord(where, "bad token ids", f"{key} of {_kind(ids)}", "a list of one or more token ids")
    return ids


def _messages(record: dict[str, Any], where: str) -> list[dict[str, str]]:
    if record.get("messages") is not None:
        key, role_key, text_key, roles = "messages", "role", "content", ROLES
    elif record.get("conversations") is not None:
        key, role_key, text_key, roles = "conversations", "from", "value", SHAREGPT_ROLES
    else:
        keys = ", ".join(sorted(map(str, record))) or "none"
        expected = "messages, conversations, or prompt_ids and answer_ids"
        raise BadRecord(where, "no messages", f"the keys {_short(keys)}", expected)
    turns = record[key]
    if not isinstance(turns, list):
        raise BadRecord(where, "wrong type", f"{key} of {_kind(turns)}", "a list of turns")
    if not turns:
        raise BadRecord(where, "empty conversation", f"an empty {key}", "at least a user and an assistant turn")
    if key == "conversations" and isinstance(turns[0], dict) and "from" not in turns[0]:  # seen under both spellings
        role_key, text_key = "role", "content"
    messages = [_turn(turn, f"{key}[{i}]", role_key, text_key, roles, where) for i, turn in enumerate(turns)]
    _check_roles([message["role"] for message in messages], key, where)
    return messages


def _turn(turn: Any, name: str, role_key: str, text_key: str, roles: dict[str, str], where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise BadRecord(where, "wrong type", f"{name} of {_kind(turn)}", f'{{"{role_key}": ..., "{text_key}": ...}}')
    role, content = turn.get(role_key), turn.get(text_key)
    if not isinstance(role, str) or role not in roles:
        got = f"{name}.{role_key} {_short(role)}"
        raise BadRecord(where, "unknown role", got, "one of " + ", ".join(roles))
    if not isinstance(content, str):
        raise BadRecord(where, "wrong type", f"{name}.{text_key} of {_kind(content)}", "a string")
    if roles[role] == "assistant" and not content.strip():
        raise BadRecord(where, "empty answer", f"an empty {name}.{text_key}", "the assistant's words")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(where, "not Unicode", f"half a surrogate pair in {name}.{text_key}", "Unicode text") from None
    return {"role": roles[role], "content": content}


def _check_roles(roles: list[str], key: str, where: str) -> None:
    if "system" in roles[1:]:
        got = f"a system turn at {key}[{roles.index('system', 1)}]"
        raise BadRecord(where, "system turn not first", got, "a system turn only at the start")
    if "assistant" not in roles:
        raise BadRecord(where, "no assistant turn", f"only {', '.join(roles[:4])} turns", "at least one assistant turn")
    first = roles[1] if roles[0] == "system" else roles[0]
    if first != "user":
        raise BadRecord(where, "no user turn first", f"an {first} turn first", "a user turn before any answer")


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {_short(value)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text.encode("ascii", "backslashreplace").decode().replace("\n", "\\n")
    return text if len(text) <= 60 else text[:57] + "..."


# ---- sources


def check_source(source: str) -> Path | None:
    """The path of a local file; None for what must be a Hub name. Raises ValueError where a file is missing."""
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"{source}: got a directory, expected a file; name one of the .jsonl files in it")
    if path.exists():
        return path
    if _looks_like_a_file(source):
        raise ValueError(f"{source}: got no such file, expected conversations as JSONL or Parquet; check data.path")
    return None


def _records(source: str, streaming: bool) -> Iterator[tuple[str, Any]]:
    path = check_source(source)
    if path is None:
        return _hub_records(source, streaming)
    return _parquet_records(path) if path.suffix == ".parquet" else _file_records(path)


def _looks_like_a_file(source: str) -> bool:
    name = source.removesuffix(".gz").removesuffix(".xz")
    return name != source or name.endswith(FILE_ENDINGS) or source.startswith((".", "/", "~")) or source.count("/") > 1


def _file_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(location, bytes of a line) of JSONL, (location, value) of a JSON list."""
    is_list = path.name.removesuffix(".gz").removesuffix(".xz").endswith(".json")
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as lines:
            if is_list:
                yield from _list_records(path, lines.read())
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", line.rstrip(b"\r\n")
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise ValueError(
            f"{path}: got {type(error).__name__} ({error}), expected a readable, complete file; copy or make it again"
        ) from error


def _list_records(path: Path, content: bytes) -> Iterable[tuple[str, Any]]:
    """A .json file: a list of records. One that starts otherwise is taken for JSON lines under another name."""
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return [(f"{path}:{n}", line) for n, line in enumerate(content.splitlines(), 1) if line.strip()]
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        got = f"the byte 0x{content[error.start]:02x}"
        raise BadRecord(f"{path}:{line}", "not UTF-8", got, "UTF-8 text", "convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        got = f"broken JSON ({error.msg} at column {error.colno})"
        raise BadRecord(f"{path}:{error.lineno}", "broken JSON", got, "a JSON list", "fix the file") from None
    except RecursionError:
        raise ValueError(f"{path}:1: got JSON nested too deeply, expected a list of records; fix the file") from None
    return [(f"{path}:record {n}", record) for n, record in enumerate(records, 1)]


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(location, row), a few thousand rows in memory at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{path}: got a Parquet file, and reading it needs the package `pyarrow`; "
            "pip install 'medusa-decoding[train]', or convert it to JSONL"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: got {type(error).__name__} ({error}), expected a complete Parquet file; copy or make it again"
        ) from error


def _hub_records(source: str, streaming: bool) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{source}: got no such file, and reading it as a Hub dataset needs the package `datasets`; "
            "check the path, or: pip install 'medusa-decoding[train]'"
        ) from None
    name, _, split = source.partition(":")
    split = split or "train"
    options = {"streaming": True} if streaming else {}
    try:
        rows = iter(datasets.load_dataset(name, split=split, **options))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{source}: got no such file and no Hub dataset {name} with a split {split} ({_first_line(error)}), "
            "expected a file or org/name[:split]; check the name and the connection"
        ) from error
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # whatever the transport raises: it differs between backends and releases
            raise ValueError(
                f"{name}:{split}: got {type(error).__name__} ({_first_line(error)}) behind row {number}, expected the "
                "rest of the dataset; check the connection and run again"
            ) from error
        number += 1
        yield f"{name}:{split}:{number}", dict(row)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
