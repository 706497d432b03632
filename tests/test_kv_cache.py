"""The ragged cache against lists of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.kv_cache import KVCache

pytestmark = pytest.mark.transformers_compat
LAYERS, HEADS, SIZE = 2, 3, 4


def write(cache, rows, generator, num_tokens):
    """One forward's keys and values of all layers, as the model hands them over; returns what each layer got back."""
    cache.begin_forward(rows, num_tokens)
    batch = rows.stop - rows.start
    states = torch.randn(LAYERS, 2, batch, HEADS, num_tokens, SIZE, generator=generator)
    return states, [cache.update(states[layer, 0], states[layer, 1], layer) for layer in range(LAYERS)]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_rows_hold_exactly_what_was_committed(seed, batch):
    generator = torch.Generator().manual_seed(seed)
    cache, rows = KVCache(LAYERS, batch, 64), slice(0, batch)
    expected = [torch.empty(LAYERS, 2, HEADS, 0, SIZE) for _ in range(batch)]
    for _ in range(5):
        num_tokens = int(torch.randint(1, 7, (), generator=generator))
        states, _ = write(cache, rows, generator, num_tokens)
        counts = torch.randint(0, num_tokens + 1, (batch,), generator=generator)
        nodes = torch.zeros(batch, num_tokens, dtype=torch.int64)
        for row, count in enumerate(counts.tolist()):
            nodes[row, :count] = torch.randperm(num_tokens, generator=generator)[:count].sort().values
        cache.commit(rows, nodes, counts)
        for row, count in enumerate(counts.tolist()):
            kept = states[:, :, row, :, nodes[row, :count]]
            expected[row] = torch.cat([expected[row], kept], dim=3)
        assert cache.lengths.tolist() == [row.shape[3] for row in expected]
        _, layers = write(cache, rows, generator, 1)
        for layer, (keys, values) in enumerate(layers):
            for row in range(batch):
                length = int(cache.lengths[row])
                assert torch.equal(keys[row, :, :length], expected[row][layer, 0])
                assert torch.equal(values[row, :, :length], expected[row][layer, 1])


def test_new_tokens_stand_behind_the_longest_row():
    cache, generator = KVCache(LAYERS, 2, 16), torch.Generator()
    write(cache, slice(0, 2), generator, 4)
    cache.commit(slice(0, 2), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]]), torch.tensor([4, 1]))
    states, layers = write(cache, slice(0, 2), generator, 3)
    keys, _ = layers[1]
    assert keys.shape == (2, HEADS, 7, SIZE) and torch.equal(keys[:, :, 4:], states[1, 0])


def test_rows_move_and_are_cleared():
    cache, generator = KVCache(LAYERS, 3, 16), torch.Generator()
    states, _ = write(cache, slice(0, 3), generator, 2)
    cache.commit(slice(0, 3), torch.tensor([[0, 1]] * 3), torch.tensor([2, 1, 2]))
    cache.move_row(2, 0)
    cache.clear_row(2)
    assert cache.lengths.tolist() == [2, 1, 0]
    _, layers = write(cache, slice(0, 2), generator, 1)
    assert torch.equal(layers[0][0][0, :, :2], states[0, 0, 2])
    assert torch.equal(layers[0][0][1, :, :1], states[0, 0, 1, :, :1])


def test_a_full_cache_refuses_with_the_numbers():
    cache, generator = KVCache(LAYERS, 1, 5), torch.Generator()
    write(cache, slice(0, 1), generator, 4)
    cache.commit(slice(0, 1), torch.arange(4)[None], torch.tensor([4]))
    with pytest.raises(ValueError, match="4 tokens and 2 more need 6 slots, there are 5"):
        cache.begin_forward(slice(0, 1), 2)


def test_memory_is_what_the_docstring_says():
    cache = KVCache(LAYERS, 3, 16)
    assert cache.num_bytes() == 0
    write(cache, slice(0, 1), torch.Generator(), 2)
    assert cache.num_bytes() == 2 * LAYERS * 3 * 16 * HEADS * SIZE * 4
