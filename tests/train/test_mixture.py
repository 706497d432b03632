"""Sources by weight: exact counts, a pure function of seed and epoch, and runs that continue bitwise."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from medusa.train.config import load_config
from medusa.train.data_statistics import SourceStatistics
from medusa.train.loop import TrainingInterrupted
from medusa.train.mixture import mix
from medusa.train.run import train
from medusa.train.signals import StopSignals


def sources(*sizes_and_weights):
    return [SourceStatistics(f"s{i}", weight, size) for i, (size, weight) in enumerate(sizes_and_weights)]


def counts(mixture, epochs):
    return Counter(i for epoch in epochs for i in mixture.epoch(epoch).tolist())


@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0, 1.5, 2.0, 2.3])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_counts_are_exact_in_every_epoch_and_even_over_epochs(size, weight):
    mixture = mix(range(size), sources((size, weight)), seed=3)
    per_epoch = max(1, round(size * weight))
    for epoch in range(5):
        assert counts(mixture, [epoch]).total() == mixture.num_per_epoch == per_epoch
    for epochs in range(1, 25):
        seen = counts(mixture, range(epochs))
        numbers = [seen[i] for i in range(size)]
        assert max(numbers) - min(numbers) <= 1 and sum(numbers) == epochs * per_epoch


def test_half_is_one_half_and_then_the_other():
    mixture = mix(range(10), sources((10, 0.5)), seed=0)
    first, second = (set(mixture.epoch(epoch).tolist()) for epoch in (0, 1))
    assert len(first) == len(second) == 5 and first | second == set(range(10))
    assert first != set(range(5))  # not by the order of the file


def test_weight_one_is_the_data_as_it_is_wherever_sources_end():
    training = [i for i in range(30) if i % 7]
    for parts in ([(30, 1.0)], [(11, 1.0), (19, 1.0)]):
        mixture = mix(training, sources(*parts), seed=5)
        assert mixture.epoch(0).tolist() == mixture.epoch(9).tolist() == training
        assert mixture.counts is None


def test_held_out_conversations_and_their_sources_stay_apart():
    training = [0, 2, 3, 11, 12, 13, 14]  # 1 and 10 are held out; the second source starts at 10
    mixture = mix(training, sources((10, 2.0), (5, 0.5)), seed=1)
    seen = counts(mixture, range(2))
    assert {i: seen[i] for i in (0, 2, 3)} == {0: 4, 2: 4, 3: 4}
    assert [seen[i] for i in (11, 12, 13, 14)] == [1, 1, 1, 1] and mixture.counts == [6, 2]
    assert mix([0, 1], sources((2, 1.0), (3, 2.0)), seed=1).counts is None  # all of the second is held out


def test_a_pure_function_of_seed_and_epoch():
    def make(seed):
        return mix(range(50), sources((20, 0.3), (30, 1.7)), seed)

    assert np.array_equal(make(4).epoch(7), make(4).epoch(7))
    assert not np.array_equal(make(4).epoch(7), make(5).epoch(7))
    assert not np.array_equal(make(4).epoch(7), make(4).epoch(8))


# ---- whole runs


@pytest.fixture
def two_files(chat_file, tmp_path):
    lines = chat_file.read_text().splitlines(keepends=True)
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    paths[0].write_text("".join(lines[:10]))
    paths[1].write_text("".join(lines[10:]))
    return [str(path) for path in paths]


def test_a_weighted_run_is_reported_and_continues_bitwise(
    make_config, config_file, two_files, tmp_path, read_metrics, monkeypatch
):
    weighted = [{"path": two_files[0], "weight": 2}, {"path": two_files[1], "weight": 0.5}]
    settings = {"data__path": weighted, "data__holdout_fraction": 0.0, "optim__epochs": 6}
    straight = train(make_config("straight", **settings))
    assert straight.steps == 6 * 9  # 2 x 10 and 30 / 2 conversations by fours

    checks = []

    class Signalled(StopSignals):
        @property
        def received(self):
            checks.append(0)
            return len(checks) == 25  # in the third epoch

        @received.setter
        def received(self, value): ...

    with monkeypatch.context() as patch:
        patch.setattr("medusa.train.loop.StopSignals", Signalled)
        with pytest.raises(TrainingInterrupted):
            train(make_config("stopped", **settings))
    with pytest.raises(ValueError, match=r"conversations of each source in an epoch was \[20, 15\], now \[10, 15\]"):
        train(make_config("stopped", **settings | {"data__path": [two_files[0], weighted[1]]}))
    train(make_config("stopped", **settings))
    weights = [(tmp_path / out / "heads.safetensors").read_bytes() for out in ("straight", "stopped")]
    assert weights[0] == weights[1]
    written = load_config(tmp_path / "straight" / "training" / "config.yaml").data.path
    assert [source.weight for source in written] == [2.0, 0.5]


def test_equal_weights_are_the_sources_as_one_file(make_config, two_files, read_metrics):
    train(make_config("one"))
    train(make_config("two", data__path=[two_files[0], {"path": two_files[1], "weight": 1}]))
    losses = [[record["loss"] for record in read_metrics(out)] for out in ("one", "two")]
    assert losses[0] == losses[1]


def test_statistics_say_what_each_source_gave(two_files, tokenizer):
    from medusa.train.config import DataSource
    from medusa.train.dataset import build_dataset

    sources = [two_files[0], DataSource(path=two_files[1], weight=0.5)]
    statistics = build_dataset(sources, tokenizer, 512).statistics
    assert [(s.conversations, s.weight) for s in statistics.sources] == [(10, 1.0), (30, 0.5)]
    assert sum(source.tokens for source in statistics.sources) == statistics.tokens
    second = statistics.sources[1].tokens
    assert str(statistics).splitlines()[-1] == (
        f"source         {two_files[1]}: 30 conversations, {second:,} tokens, weight 0.5"
    )
    assert "source" not in str(build_dataset(two_files[0], tokenizer, 512).statistics)
    assert json.loads(json.dumps(statistics.to_dict())) == statistics.to_dict()
    assert type(statistics).from_dict(statistics.to_dict()) == statistics
