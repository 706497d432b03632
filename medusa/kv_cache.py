"""Preallocated key/value cache for tree decoding, with a length per row.

A forward of N tokens writes its keys and values to the slots `[width, width + N)` of every row, where `width` is the
longest row's length: one slice per layer, nothing grows and nothing is copied. A slot carries no position (keys are
rotated before they are stored), so a shorter row simply has a hole that its mask hides. `commit` then moves the
accepted nodes of each row to the end of that row and forgets the rest. Layers of all kinds keep everything; sliding
windows are the mask's business. Memory: 2 x layers x rows x capacity x kv heads x head size x bytes per element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

# Which block of the storage: (kind, heads, head size). And slots cut out of it: [layers, H, S, d].
BlockKey = tuple[str, int, int]
Slots = Mapping[BlockKey, Tensor]


class KVCache(Cache):
    """Keys and values of up to `num_rows` sequences of up to `capacity` slots each.

    `lengths`, int64 [num_rows] on the CPU: committed tokens per row. Storage is allocated at the first forward, one
    block for all layers of a shape.
    """

    def __init__(self, num_layers: int, num_rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.num_layers, self.num_rows, self.capacity = num_layers, num_rows, capacity
        self.lengths = torch.zeros(num_rows, dtype=torch.int64)
        self._blocks: dict[BlockKey, Tensor] = {}  # [layers, B, H, S, d]
        self._rows = slice(0, num_rows)
        self._offset = 0

    def begin_forward(self, rows: slice, num_tokens: int) -> int:
        """Say which rows the next forward works on and how many tokens it adds; returns `width`, the slots before.

        Raises ValueError when the rows have no room for them.
        """
        width = int(self.lengths[rows].max())
        if width + num_tokens > self.capacity:
            raise ValueError(
                f"KV cache: {width} tokens and {num_tokens} more need {width + num_tokens} slots, "
                f"there are {self.capacity}; make the cache larger or the request shorter"
            )
        self._rows, self._offset = rows, width
        return width

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Transformers' hook: store one layer's [B, H, N, d] and return that layer's [B, H, width + N, d]."""
        end = self._offset + key_states.shape[2]
        result = []
        for kind, states in (("key", key_states), ("value", value_states)):
            rows = self._block((kind, states.shape[1], states.shape[3]), states)[layer_idx, self._rows]
            rows[:, :, self._offset : end] = states
            result.append(rows[:, :, :end])
        return result[0], result[1]

    def commit(self, rows: slice, nodes: Tensor, counts: Tensor) -> None:
        """Keep the accepted nodes of the last forward.

        nodes: int64 [B, A], node indices in order, padded with anything after `counts[b]`. counts: int64 [B], at
        least 0. Row b grows by `counts[b]`.
        """
        source, lengths = nodes + self._offset, self.lengths[rows]
        target = lengths[:, None] + torch.arange(nodes.shape[1])
        # Copied in one indexed move per block; padding and entries already in place copy a slot onto itself.
        moves = (torch.arange(nodes.shape[1]) < counts[:, None]) & (source != target)
        if bool(moves.any()):
            row, column = moves.nonzero(as_tuple=True)
            source, target = source[row, column], target[row, column]
            for block in self._blocks.values():
                part = block[:, rows]
                row, source, target = (index.to(block.device) for index in (row, source, target))
                part[:, row, :, target] = part[:, row, :, source]
        self.lengths[rows] = lengths + counts

    def move_row(self, source: int, target: int) -> None:
        """Let row `target` hold what row `source` holds."""
        length = int(self.lengths[source])
        for block in self._blocks.values():
            block[:, target, :, :length] = block[:, source, :, :length]
        self.lengths[target] = length

    def clear_row(self, row: int) -> None:
        self.lengths[row] = 0

    def copy_out(self, row: int, start: int, end: int) -> Slots:
        """Copies of a row's tokens `start` to `end`, which are committed."""
        assert end <= int(self.lengths[row]), (row, end, self.lengths)
        return {key: block[:, row, :, start:end].clone() for key, block in self._blocks.items()}

    def copy_in(self, row: int, slots: Slots) -> None:
        """Append what `copy_out` gave, of this or another cache of the same model."""
        start = int(self.lengths[row])
        for key, states in slots.items():
            end = start + states.shape[2]
            self._block(key, states)[:, row, :, start:end] = states
        self.lengths[row] = end

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._offset + query_length, 0

    def num_bytes(self) -> int:
        """Bytes allocated (0 before the first forward)."""
        return sum(block.numel() * block.element_size() for block in self._blocks.values())

    def _block(self, key: BlockKey, states: Tensor) -> Tensor:
        """The storage of that key, made on first use like `states`."""
        if key not in self._blocks:
            _, num_kv_heads, head_size = key
            # Zeros, not empty: a masked slot must still hold finite numbers.
            shape = (self.num_layers, self.num_rows, num_kv_heads, self.capacity, head_size)
            self._blocks[key] = states.new_zeros(shape)
        return self._blocks[key]
