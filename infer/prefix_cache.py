"""Keys and values of earlier requests, by their tokens: a prompt that begins like one of them is not computed again.

Sequences are cut into blocks of `BLOCK` tokens; a block is known by the block before it and its own tokens, so that a
shared beginning (a system prompt, the turns of a conversation so far) is stored once and found with one look-up a
block. Blocks are copies, beside the cache's own rows: memory is theirs alone and bounded, the least recently used go
first, and a block always before the ones that it continues from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from medusa.kv_cache import KVCache, Slots

BLOCK = 32  # tokens
PREFIX_CACHE_BYTES = 256 << 20  # what a server may well spend

# (number of the block before, 0 for none; the block's tokens)
_Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Block:
    number: int
    slots: Slots
    num_bytes: int


class PrefixCache:
    """Holds `max_bytes` of keys and values at most. Numbers of blocks are never used twice, so that one whose
    beginning was thrown away is not found through another that came in its place."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()  # least recently used first
        self._num_made = 0

    @torch.inference_mode()
    def restore(self, cache: KVCache, row: int, token_ids: Sequence[int]) -> int:
        """Fill an empty row with the longest known beginning of `token_ids`; returns its length in tokens."""
        assert int(cache.lengths[row]) == 0, "a row that already holds something"
        keys = self._known(token_ids)
        for key in keys:
            cache.copy_in(row, self._blocks[key].slots)
        self._touch(keys)
        return len(keys) * BLOCK

    @torch.inference_mode()
    def store(self, cache: KVCache, row: int, token_ids: Sequence[int]) -> None:
        """Remember a row that holds `token_ids`, as far as it fills whole blocks."""
        keys = self._known(token_ids)
        self._touch(keys)
        before = self._blocks[keys[-1]].number if keys else 0
        for start in range(len(keys) * BLOCK, len(token_ids) - BLOCK + 1, BLOCK):
            slots = cache.copy_out(row, start, start + BLOCK)
            num_bytes = sum(states.numel() * states.element_size() for states in slots.values())
            if (len(keys) + 1) * num_bytes > self.max_bytes:
                break  # its own beginning would have to go
            self._num_made += 1
            key = (before, tuple(token_ids[start : start + BLOCK]))
            self._blocks[key] = _Block(self._num_made, slots, num_bytes)
            self.num_bytes += num_bytes
            keys.append(key)
            before = self._num_made
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._blocks.popitem(last=False)[1].num_bytes
        self._touch(keys)

    def _known(self, token_ids: Sequence[int]) -> list[_Key]:
        """Keys of the blocks that `token_ids` begin with."""
        keys: list[_Key] = []
        before = 0
        for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
            key = (before, tuple(token_ids[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                break
            keys.append(key)
            before = block.number
        return keys

    def _touch(self, keys: Sequence[_Key]) -> None:
        """The last first, so that no block is older than one that continues it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
