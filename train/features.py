"""Where the heads' inputs come from: the frozen base run on each batch, or hidden states computed once on disk.

Both give [n, D]: the rows of `label_positions`, example by example, so everything behind is the same code. On disk only
those positions are kept, in the base's dtype, as raw `.bin` shards written atomically, so that an interrupted run goes
on at the next shard. Several processes share the work and need a shared directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from medusa.base_model import BaseModel
from medusa.checkpoint import write_atomically

from .batching import Batch, Example, collate
from .labels import label_positions
from .packing import pack

SHARD_EXAMPLES = 16
INDEX_FILE = "index.json"


class HiddenSource(Protocol):
    """hidden(indices, batch) -> [n, D] on the batch's device; `batch` is the examples of `indices`, collated.

    idle(): takes part in a batch of which only other processes have examples; a sharded base needs them all."""

    def hidden(self, indices: Sequence[int], batch: Batch) -> Tensor: ...

    def idle(self) -> None: ...


@dataclass
class OnlineHidden:
    """Runs the base on every batch. `row_length`: see `states_at`."""

    base: BaseModel
    num_heads: int
    row_length: int | None = None

    def hidden(self, indices: Sequence[int], batch: Batch) -> Tensor:
        return states_at(self.base, batch, label_positions(batch.loss_mask, self.num_heads), self.row_length)

    def idle(self) -> None:
        one = torch.ones(1, 1, dtype=torch.int64, device=self.base.device)
        with torch.no_grad():
            self.base.hidden_states(one, one.bool())


def states_at(base: BaseModel, batch: Batch, positions: Tensor, row_length: int | None) -> Tensor:
    """The base's hidden states [n, D] at the n `positions` (bool [B, T]) of a batch, example by example.

    `row_length`: pack the examples into rows of so many tokens; None: each has a row of its own.
    """
    if row_length is None:
        return base.hidden_states(batch.input_ids, batch.attention_mask)[positions]
    rows = pack(batch, row_length)
    states = base.packed_hidden_states(rows.input_ids, rows.documents)
    return states.flatten(0, 1)[rows.places[positions]]


@dataclass(frozen=True)
class FeatureLayout:
    """Which shard holds what. Shards go from the longest examples to the shortest, which saves padding, and shows
    at once whether memory suffices."""

    folder: Path
    examples: Sequence[Example]
    num_heads: int
    hidden_size: int
    dtype: torch.dtype

    @cached_property
    def positions(self) -> list[int]:
        """Rows kept of each example."""
        return [int(label_positions(example.loss_mask[None], self.num_heads).sum()) for example in self.examples]

    @cached_property
    def shards(self) -> list[list[int]]:
        """Indices of the examples in each shard, in the order of their rows."""
        order = sorted(range(len(self.examples)), key=lambda i: -len(self.examples[i]))
        return [order[start : start + SHARD_EXAMPLES] for start in range(0, len(order), SHARD_EXAMPLES)]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """(shard, first row) of each example."""
        places = {}
        for number, members in enumerate(self.shards):
            row = 0
            for index in members:
                places[index] = (number, row)
                row += self.positions[index]
        return places

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.bin"

    def num_rows(self, number: int) -> int:
        return sum(self.positions[index] for index in self.shards[number])

    def num_bytes(self, number: int) -> int:
        return self.num_rows(number) * self.hidden_size * self.dtype.itemsize

    def num_tokens(self, number: int) -> int:
        return sum(len(self.examples[index]) for index in self.shards[number])

    def is_done(self, number: int) -> bool:
        path = self.path(number)
        return path.exists() and path.stat().st_size == self.num_bytes(number)

    def num_forwards(self, shards: Sequence[int], batch_size: int) -> int:
        """Batches that those of `shards` need which are not there yet."""
        return sum(-(-len(self.shards[n]) // batch_size) for n in shards if not self.is_done(n))


class CachedHidden:
    """Reads what `compute_features` wrote. Shards are memory-mapped: a batch costs its own rows, not the set's."""

    def __init__(self, layout: FeatureLayout) -> None:
        self.layout = layout
        self._shards: dict[int, Tensor] = {}

    def hidden(self, indices: Sequence[int], batch: Batch) -> Tensor:
        rows = []
        for index in indices:
            number, start = self.layout.places[index]
            rows.append(self._shard(number)[start : start + self.layout.positions[index]])
        return torch.cat(rows).to(batch.input_ids.device)

    def idle(self) -> None:
        """The base is not needed."""

    def _shard(self, number: int) -> Tensor:
        if number not in self._shards:
            layout = self.layout
            shape = (layout.num_rows(number), layout.hidden_size)
            if not layout.is_done(number):
                raise ValueError(
                    f"{layout.path(number)}: got no such file or part of one, expected hidden states computed before; "
                    "something removed them while they were in use: run the same command again to continue"
                )
            flat = torch.empty(0, dtype=layout.dtype)  # an empty file cannot be mapped
            if shape[0]:
                flat = torch.from_file(str(layout.path(number)), size=shape[0] * shape[1], dtype=layout.dtype)
            self._shards[number] = flat.view(shape)
        return self._shards[number]


def prepare_folder(layout: FeatureLayout, identity: str) -> int:
    """Empties the folder unless it holds features of the same `identity` (base, data, heads, dtype). Returns the bytes
    that are still to be written. Raises ValueError where the disk lacks room for them."""
    folder, index = layout.folder, layout.folder / INDEX_FILE
    content = json.dumps({"identity": identity}) + "\n"
    if not index.is_file() or index.read_text(encoding="utf-8") != content:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_atomically({index: lambda path: path.write_text(content, encoding="utf-8")})
    missing = sum(layout.num_bytes(n) for n in range(len(layout.shards)) if not layout.is_done(n))
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ValueError(
            f"{folder}: got {free / 1e9:.2f} GB of free disk, expected {missing / 1e9:.2f} GB for hidden states; "
            "free some, set data.limit or data.max_length lower, or train.cache_hidden_states=false"
        )
    return missing


def compute_features(
    layout: FeatureLayout,
    source: OnlineHidden,
    batch_size: int,
    shards: Sequence[int],
    progress: Callable[[int, bool], None],
) -> None:
    """Writes those of `shards` that are not there yet. After each, `progress(its tokens, whether computed now)`."""
    for number in shards:
        is_done = layout.is_done(number)
        if not is_done:
            rows = torch.cat(list(_hidden_of(source, layout, layout.shards[number], batch_size)))
            data = rows.contiguous().view(torch.uint8).numpy()
            write_atomically({layout.path(number): data.tofile})
        progress(layout.num_tokens(number), not is_done)


def _hidden_of(
    source: OnlineHidden, layout: FeatureLayout, indices: Sequence[int], batch_size: int
) -> Iterator[Tensor]:
    """[n, D] of each batch, on the CPU."""
    for start in range(0, len(indices), batch_size):
        own = indices[start : start + batch_size]
        batch = collate([layout.examples[i] for i in own]).to(source.base.device)
        yield source.hidden(own, batch).cpu()
