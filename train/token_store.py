"""Tokenised conversations in files, read through a memory map: sets larger than memory train.

Four bytes a token: its id, and in the highest bit whether it is under loss. The store is written once, by one process,
into a folder that is renamed into place when it is complete; an interrupted writing starts over. What it costs in
memory is a few numbers a conversation; the pages of the map are the operating system's to drop.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from rich.console import Console

from .batching import Example
from .data_statistics import DataStatistics

LOSS_BIT = np.uint32(1 << 31)
BUFFER_TOKENS = 1 << 22  # 16 MB are written at a time
TOKENS, ENDS, CATEGORIES, INDEX = "tokens.bin", "ends.npy", "categories.npy", "index.json"


@dataclass(frozen=True)
class StoreIndex:
    """`identity`: what the tokens were made of and how. `fingerprint`: see `dataset.py`. `categories`: their names."""

    identity: str
    fingerprint: str
    num_tokens: int
    categories: list[str]
    statistics: dict[str, Any]


class TokenStore(Sequence[Example]):
    """A complete store. `lengths`: int64 [N], tokens of each example."""

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        self.fingerprint = index.fingerprint
        self.category_names = index.categories
        self.statistics = DataStatistics.from_dict(index.statistics)
        self._ends: np.ndarray = np.load(folder / ENDS)
        self._categories: np.ndarray = np.load(folder / CATEGORIES)
        self._tokens = np.memmap(folder / TOKENS, dtype=np.uint32, mode="r")
        self.lengths: np.ndarray = np.diff(self._ends, prepend=0)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = int(self._ends[index])
        tokens = np.asarray(self._tokens[end - int(self.lengths[index]) : end])
        category = int(self._categories[index])
        return Example(
            torch.from_numpy((tokens & ~LOSS_BIT).astype(np.int64)),
            torch.from_numpy(tokens >= LOSS_BIT),
            None if category < 0 else self.category_names[category],
        )


def open_store(folder: Path, identity: str) -> TokenStore | None:
    """The store in `folder`; None where there is none that is complete and of this `identity`."""
    path = folder / INDEX
    if not path.is_file():
        return None
    index = StoreIndex(**json.loads(path.read_text(encoding="utf-8")))
    tokens = folder / TOKENS
    if index.identity != identity or not tokens.is_file() or tokens.stat().st_size != 4 * index.num_tokens:
        return None
    return TokenStore(folder, index)


class StoreWriter:
    """Writes a store in place of what is in `folder`. A context manager: left by an exception, it leaves nothing.

    Raises ValueError as soon as the disk lacks room for what is about to be written.
    """

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self.folder = folder
        self.console = console
        self._partial = folder.with_name(folder.name + ".partial")
        self._buffer: list[np.ndarray] = []
        self._buffered = 0
        self._ends = array("q")
        self._categories = array("i")
        self._numbers: dict[str, int] = {}

    def __enter__(self) -> StoreWriter:
        for folder in (self.folder, self._partial):
            shutil.rmtree(folder, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._say(f"being written to {self.folder}, 4 bytes each; {self._free() / 1e9:,.1f} GB are free there")
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def num_tokens(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, example: Example) -> None:
        ids, mask = example.input_ids.numpy().astype(np.uint32), example.loss_mask.numpy()
        self._buffer.append(ids | np.where(mask, LOSS_BIT, np.uint32(0)))
        self._buffered += len(ids)
        self._ends.append(self.num_tokens + len(ids))
        category = example.category
        self._categories.append(-1 if category is None else self._numbers.setdefault(category, len(self._numbers)))
        if self._buffered >= BUFFER_TOKENS:
            self._flush()

    def finish(self, identity: str, fingerprint: str, statistics: DataStatistics) -> None:
        self._flush()
        index = StoreIndex(identity, fingerprint, self.num_tokens, list(self._numbers), statistics.to_dict())
        try:
            np.save(self._partial / ENDS, np.array(self._ends, dtype=np.int64))
            np.save(self._partial / CATEGORIES, np.array(self._categories, dtype=np.int32))
            (self._partial / INDEX).write_text(json.dumps(asdict(index)), encoding="utf-8")
            for path in self._partial.iterdir():  # on disk before the name says so
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._lacks_room(str(error)) from error
        self._partial.rename(self.folder)
        self._say(f"{4 * self.num_tokens / 1e6:,.1f} MB written to {self.folder}")

    def _flush(self) -> None:
        if self._free() < 4 * self._buffered:
            raise self._lacks_room("too little")
        try:
            with (self._partial / TOKENS).open("ab") as file:
                for tokens in self._buffer:
                    file.write(tokens.tobytes())
        except OSError as error:
            raise self._lacks_room(str(error)) from error
        self._buffer, self._buffered = [], 0

    def _lacks_room(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.folder}: got {self._free() / 1e9:.2f} GB of free disk after {len(self._ends):,} conversations "
            f"({reason}), expected room for 4 bytes a token; free some, set data.limit or data.max_length lower, or "
            "train.output_dir to a larger disk"
        )

    def _free(self) -> int:
        return shutil.disk_usage(self._partial).free

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(f"{'token store':<14} {text}", highlight=False, markup=False)
