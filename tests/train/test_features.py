"""Hidden states on disk are those of the base, only where needed, and an interrupted pass goes on where it stopped."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pytest
import torch

from medusa.base_model import adapt_base_model
from medusa.train.batching import Example, collate
from medusa.train.features import (
    SHARD_EXAMPLES,
    CachedHidden,
    FeatureLayout,
    OnlineHidden,
    compute_features,
    prepare_folder,
)
from medusa.train.labels import gather_labels
from tiny_models import tiny_model, tiny_tokenizer

K, D = 3, 32


@pytest.fixture(scope="module")
def base():
    return adapt_base_model(tiny_model(), tiny_tokenizer(), name="tiny")


def make_examples(count=2 * SHARD_EXAMPLES + 5):
    generator = torch.Generator().manual_seed(0)
    examples = []
    for i in range(count):
        length = 6 + i % 11
        ids = torch.randint(0, 100, (length,), generator=generator)
        examples.append(Example(ids, torch.arange(length) >= 4 + i % 3))
    return examples


@pytest.fixture
def layout(tmp_path):
    return FeatureLayout(tmp_path / "features", make_examples(), K, D, torch.float32)


def compute(layout, base, shards=None):
    done, shards = [], shards or range(len(layout.shards))
    compute_features(layout, OnlineHidden(base, K), 4, shards, lambda *news: done.append(news))
    return done


def test_cached_rows_are_the_online_ones_and_belong_to_their_labels(layout, base):
    prepare_folder(layout, "a")
    compute(layout, base)
    online, cached = OnlineHidden(base, K), CachedHidden(layout)
    for indices in ([0, 36, 17], [5], [20, 1]):
        batch = collate([layout.examples[i] for i in indices])
        expected = online.hidden(indices, batch)
        torch.testing.assert_close(cached.hidden(indices, batch), expected, atol=1e-5, rtol=1e-5)
        assert len(expected) == len(gather_labels(batch.input_ids, batch.loss_mask, K, torch.arange(128)))


def test_online_hidden_states_do_not_depend_on_padding(base):
    short, long = make_examples(11)[1], make_examples(11)[10]
    alone = OnlineHidden(base, K).hidden([0], collate([short]))
    padded = OnlineHidden(base, K).hidden([0, 1], collate([short, long], pad_id=2))
    torch.testing.assert_close(padded[: len(alone)], alone, atol=1e-5, rtol=1e-5)


def test_only_rows_that_some_head_needs_are_stored(layout, base):
    missing = prepare_folder(layout, "a")
    compute(layout, base)
    stored = sum(path.stat().st_size for path in layout.folder.glob("*.bin"))
    # A label at s is reached from s - 1 (the base's own guess) to s - 4: the first ones of an answer from its prompt.
    labelled = [example for example in layout.examples if example.loss_mask.any()]
    needed = sum(int((torch.arange(len(e)) >= e.loss_mask.int().argmax() - K - 1)[:-1].sum()) for e in labelled)
    assert stored == missing == needed * D * 4
    assert needed < sum(len(example) for example in layout.examples)


def test_an_interrupted_pass_goes_on_at_the_next_shard(layout, base):
    whole = prepare_folder(layout, "a")
    compute(layout, base, [0, 1])
    kept = layout.path(0).read_bytes()
    layout.path(1).write_bytes(layout.path(1).read_bytes()[:-4])  # cut short: as good as missing
    assert prepare_folder(layout, "a") == whole - layout.num_bytes(0)
    assert [is_new for _, is_new in compute(layout, base)] == [False, True, True]
    assert layout.path(0).read_bytes() == kept
    assert prepare_folder(layout, "a") == 0


def test_features_of_another_base_or_data_are_not_used(layout, base):
    whole = prepare_folder(layout, "a")
    compute(layout, base)
    assert prepare_folder(layout, "b") == whole


def test_a_disk_too_small_is_refused_beforehand(layout, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10))
    with pytest.raises(ValueError, match=r"got 0\.00 GB of free disk, expected 0\.00 GB .*\.cache_hidden_states=false"):
        prepare_folder(layout, "a")


def test_bfloat16_rows_and_an_example_without_labels(tmp_path):
    base = adapt_base_model(tiny_model().bfloat16(), tiny_tokenizer(), name="tiny")
    empty = Example(torch.tensor([5, 6]), torch.tensor([False, False]))
    layout = FeatureLayout(tmp_path / "f", [empty] * SHARD_EXAMPLES + make_examples(1), K, D, torch.bfloat16)
    prepare_folder(layout, "a")
    compute(layout, base)
    for indices, rows in (([0], 0), ([1, SHARD_EXAMPLES], 5)):
        hidden = CachedHidden(layout).hidden(indices, collate([layout.examples[i] for i in indices]))
        assert hidden.dtype == torch.bfloat16 and hidden.shape == (rows, D)
