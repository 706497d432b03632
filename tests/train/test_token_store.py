"""Tokens in a file: the same examples as in memory, written once, never half, refused where the disk lacks room."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections import namedtuple

import pytest
import torch
from rich.console import Console

from medusa.train import token_store
from medusa.train.config import DataConfig
from medusa.train.dataset import build_dataset, load_data
from medusa.train.run import train


@pytest.fixture
def source(tmp_path):
    lines = [
        {
            "messages": [{"role": "user", "content": "hi " * (i % 5)}, {"role": "assistant", "content": f"answer {i}"}],
            **({"category": f"c{i % 3}"} if i % 4 else {}),
        }
        for i in range(60)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def stream(source, tokenizer, folder, is_main_process=True, console=None, **settings):
    config = DataConfig(path=str(source), streaming=True, **{"max_length": 50, **settings})
    return load_data(config, tokenizer, folder, is_main_process, console)


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch):
    monkeypatch.setattr(token_store, "BUFFER_TOKENS", 200)


def test_examples_are_those_in_memory(source, tokenizer, tmp_path):
    stored, memory = stream(source, tokenizer, tmp_path / "tokens"), build_dataset(str(source), tokenizer, 50)
    assert len(stored) == len(memory) == 60 and stored.lengths.tolist() == memory.lengths.tolist()
    for a, b in zip(stored, memory, strict=True):
        assert torch.equal(a.input_ids, b.input_ids) and a.input_ids.dtype == torch.int64
        assert torch.equal(a.loss_mask, b.loss_mask) and a.loss_mask.dtype == torch.bool
        assert a.category == b.category
    assert stored.fingerprint == memory.fingerprint and stored.statistics == memory.statistics
    assert torch.equal(stored[-1].input_ids, memory[-1].input_ids) and len(stored[2:5]) == 3
    size = sum(path.stat().st_size for path in (tmp_path / "tokens").glob("tokens.bin"))
    assert size == 4 * stored.statistics.tokens


def test_it_is_made_once_for_the_same_data_and_anew_for_other(source, tokenizer, tmp_path):
    folder = tmp_path / "tokens"
    stream(source, tokenizer, folder)
    made = (folder / "tokens.bin").stat().st_mtime_ns

    def is_reused(**settings):
        stream(source, tokenizer, folder, **settings)
        return (folder / "tokens.bin").stat().st_mtime_ns == made

    assert is_reused() and is_reused(num_workers=1, holdout_fraction=0.5)
    assert not is_reused(max_length=20)
    stream(source, tokenizer, folder)
    made = (folder / "tokens.bin").stat().st_mtime_ns
    assert is_reused()
    os.utime(source, ns=(1, 1))
    assert not is_reused()


@pytest.mark.parametrize("damage", ["cut", "no index", "no tokens"])
def test_a_damaged_store_is_made_anew(source, tokenizer, tmp_path, damage):
    folder = tmp_path / "tokens"
    first = stream(source, tokenizer, folder).fingerprint
    if damage == "cut":
        (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-4])
    else:
        (folder / ("index.json" if damage == "no index" else "tokens.bin")).unlink()
    again = stream(source, tokenizer, folder)
    assert again.fingerprint == first and (folder / "tokens.bin").stat().st_size == 4 * again.statistics.tokens


def test_an_interrupted_writing_leaves_nothing(source, tokenizer, tmp_path):
    source.write_text(source.read_text() + "\n{")
    with pytest.raises(ValueError, match=r"data\.jsonl:61: got broken JSON"):
        stream(source, tokenizer, tmp_path / "tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]
    (tmp_path / "tokens.partial").mkdir()  # as a kill leaves it
    (tmp_path / "tokens.partial" / "tokens.bin").write_bytes(b"half")
    data = stream(source, tokenizer, tmp_path / "tokens", on_bad_record="skip")
    assert data.statistics.tokens * 4 == (tmp_path / "tokens" / "tokens.bin").stat().st_size


def test_a_disk_without_room_is_refused_and_left_clean(source, tokenizer, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 500))
    with pytest.raises(
        ValueError, match=r"tokens: got 0\.00 GB of free disk after \d+ conversations .* 4 bytes a token"
    ):
        stream(source, tokenizer, tmp_path / "tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]


def test_where_and_how_much_is_said(source, tokenizer, tmp_path):
    console = Console(width=300)
    with console.capture() as capture:
        data = stream(source, tokenizer, tmp_path / "tokens", console=console)
    lines = [line for line in capture.get().splitlines() if line.startswith("token store")]
    assert "4 bytes each" in lines[0] and "GB are free there" in lines[0] and len(lines) == 2
    assert f"{4 * data.statistics.tokens / 1e6:,.1f} MB written" in lines[1]


def test_other_processes_wait_for_the_one_that_writes(source, tokenizer, tmp_path, monkeypatch):
    waits = []

    def other_process_writes(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            stream(source, tokenizer, tmp_path / "tokens")

    monkeypatch.setattr("medusa.train.dataset.time.sleep", other_process_writes)
    data = stream(source, tokenizer, tmp_path / "tokens", is_main_process=False)
    assert len(data) == 60 and len(waits) == 2


def test_a_vanished_file_is_named(source, tokenizer, tmp_path):
    stream(source, tokenizer, tmp_path / "tokens")
    source.unlink()
    with pytest.raises(ValueError, match=r"data\.jsonl: got no such file, expected conversations .* check data\.path"):
        stream(source, tokenizer, tmp_path / "tokens")


def test_memory_is_a_few_numbers_a_conversation(tmp_path, tokenizer):
    """The tokens of an open store are not in it: 40,000 of them, of 40 conversations."""
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt_ids": [5] * 500, "answer_ids": [6] * 500}) + "\n")
    path.write_text(path.read_text() * 40)
    stream(path, tokenizer, tmp_path / "tokens", max_length=1000)
    tracemalloc.start()
    try:
        data = stream(path, tokenizer, tmp_path / "tokens", max_length=1000)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert data.statistics.tokens == 40_000 and kept < 40_000


# ---- whole runs


def test_a_streamed_run_is_bitwise_the_one_in_memory(make_config, tmp_path, read_metrics):
    """And may be continued as one: where the tokens are does not belong to a run's identity."""
    train(make_config("memory", optim__epochs=2))
    train(make_config("disk", optim__epochs=2, data__streaming=True))
    losses = [[record["loss"] for record in read_metrics(out)] for out in ("memory", "disk")]
    assert losses[0] == losses[1]
    weights = [(tmp_path / out / "heads.safetensors").read_bytes() for out in ("memory", "disk")]
    assert weights[0] == weights[1]
    assert not (tmp_path / "disk" / "training" / "tokens").exists()
    assert train(make_config("disk", optim__epochs=2)).steps == len(losses[0])


def test_data_that_vanishes_while_it_is_trained_on_changes_nothing(
    make_config, tmp_path, chat_file, read_metrics, monkeypatch
):
    """Neither the source nor the store is opened again."""
    from medusa.train import loop

    forward, calls = loop.forward, []
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(chat_file.read_bytes())

    def vanishing(run, indices, ramp=0.0):
        calls.append(indices)
        if len(calls) == 3:
            copy.unlink()
            shutil.rmtree(tmp_path / "out" / "training" / "tokens")
        return forward(run, indices, ramp)

    monkeypatch.setattr(loop, "forward", vanishing)
    result = train(make_config("out", data__path=str(copy), data__streaming=True))
    assert result.stop_reason == "all steps done" and not copy.exists()


def test_hidden_states_that_vanish_are_one_clear_line(make_config, tmp_path, monkeypatch):
    from medusa.train import loop

    forward = loop.forward

    def vanishing(run, indices, ramp=0.0):
        shutil.rmtree(tmp_path / "out" / "training" / "features", ignore_errors=True)
        return forward(run, indices, ramp)

    config = make_config("out", train__cache_hidden_states=True)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "forward", vanishing)
        with pytest.raises(ValueError, match=r"shard-\d+\.bin: got no such file .* run the same command again"):
            train(config)
    assert train(config).stop_reason == "all steps done"
