"""Batches: padding that hides no token, an order that needs no state, shards that add up."""

from __future__ import annotations

import pytest
import torch

from medusa.train.batching import Example, batch_order, collate, shard, split_holdout


def example(*ids: int, loss_from: int = 0) -> Example:
    mask = torch.arange(len(ids)) >= loss_from
    return Example(torch.tensor(ids), mask)


def test_padding_never_hides_a_real_token_that_equals_the_pad_id():
    batch = collate([example(5, 2, 7, 2), example(2, 9)], pad_id=2)
    assert batch.input_ids.tolist() == [[5, 2, 7, 2], [2, 9, 2, 2]]
    assert batch.attention_mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.loss_mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert (batch.input_ids.dtype, batch.loss_mask.dtype, batch.attention_mask.dtype) == (
        torch.int64,
        torch.bool,
        torch.bool,
    )


def test_loss_mask_stays_with_its_tokens():
    batch = collate([example(1, 2, 3, loss_from=2), example(4, 5, loss_from=1)])
    assert batch.loss_mask.tolist() == [[False, False, True], [False, True, False]]


def test_no_examples_make_an_empty_batch():
    assert collate([]).input_ids.shape == (0, 0)


@pytest.mark.parametrize("lengths", [None, [(7 * i) % 101 + 1 for i in range(523)]])
def test_every_example_once_an_epoch_and_a_pure_function_of_seed_and_epoch(lengths):
    order = batch_order(523, lengths, batch_size=8, seed=3, epoch=1)
    assert sorted(i for batch in order for i in batch) == list(range(523))
    assert [len(batch) for batch in order] == [8] * 65 + [3]
    assert order == batch_order(523, lengths, batch_size=8, seed=3, epoch=1)
    assert order != batch_order(523, lengths, batch_size=8, seed=3, epoch=2)
    assert order != batch_order(523, lengths, batch_size=8, seed=4, epoch=1)


def test_grouping_by_length_saves_padding_without_sorting_the_epoch():
    lengths = [(37 * i) % 512 + 1 for i in range(1000)]

    def padded(order: list[list[int]]) -> int:
        return sum(len(batch) * max(lengths[i] for i in batch) for batch in order)

    grouped = batch_order(1000, lengths, batch_size=8, seed=0, epoch=0)
    assert padded(grouped) < 1.05 * sum(lengths) < padded(batch_order(1000, None, batch_size=8, seed=0, epoch=0))
    one_bucket = batch_order(300, lengths[:300], batch_size=8, seed=0, epoch=0)
    longest = [max(lengths[i] for i in batch) for batch in one_bucket]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_batch_size_below_one_is_refused():
    with pytest.raises(ValueError, match="batch_size is 0, expected at least 1"):
        batch_order(4, None, batch_size=0, seed=0, epoch=0)


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_together_are_the_global_batch(size, world_size):
    batch = list(range(100, 100 + size))
    shards = [shard(batch, rank, world_size) for rank in range(world_size)]
    assert sum(shards, []) == batch
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_two_processes_see_the_global_batches_of_one_with_twice_the_batch():
    alone = batch_order(50, None, batch_size=2 * 4, seed=1, epoch=0)
    for batch in alone[:-1]:
        assert [len(shard(batch, rank, 2)) for rank in (0, 1)] == [4, 4]


def test_holdout_is_stable_as_the_data_grows():
    train, held = split_holdout(1000, 0.1, seed=0)
    assert sorted(train + held) == list(range(1000)) and 60 < len(held) < 140
    more_train, more_held = split_holdout(2000, 0.1, seed=0)
    assert set(held) <= set(more_held) and set(train) <= set(more_train)
    assert held != split_holdout(1000, 0.1, seed=1)[1]


def test_holdout_edges():
    assert split_holdout(5, 0.0, seed=0) == ([0, 1, 2, 3, 4], [])
    for seed in range(20):
        for fraction in (1e-9, 0.999):
            train, held = split_holdout(3, fraction, seed)
            assert train and held
    assert split_holdout(1, 0.5, seed=0)[0] + split_holdout(1, 0.5, seed=0)[1] == [0]
    with pytest.raises(ValueError, match=r"holdout fraction is 1.0, expected 0 .* data.holdout_fraction"):
        split_holdout(5, 1.0, seed=0)
