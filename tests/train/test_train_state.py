"""Checkpoints of a run: exact, refused when damaged or of another run; and metrics cut to fit them."""

from __future__ import annotations

import json

import pytest
import torch

from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.train.metrics import MetricsFile, head_metrics
from medusa.train.state import TrainState, Window, flat_settings, load_state, save_state

IDENTITY = {"optim.lr": 0.1, "data fingerprint": "aa"}


def make_state(steps):
    torch.manual_seed(1)
    heads = MedusaHeads(HeadsConfig(2, 1, 4, 10))
    state = TrainState(
        heads, torch.optim.AdamW(heads.parameters(), lr=0.1), window=Window(torch.zeros(2, 6), torch.zeros(2))
    )
    for _ in range(steps):
        advance(state)
    return state


def advance(state):
    state.optimizer.zero_grad()
    (state.heads.features(0, torch.ones(3, 4), torch.zeros(3, 2)) ** 2).sum().backward()
    state.optimizer.step()
    state.counters.step += 1
    state.window.sums += 1
    state.window.loss += 0.1


def test_continuing_is_bitwise_the_same(tmp_path):
    path = tmp_path / "training" / "checkpoint.safetensors"
    save_state(path, make_state(3), IDENTITY)
    resumed = make_state(0)
    load_state(path, resumed, IDENTITY)
    straight = make_state(5)
    for _ in range(2):
        advance(resumed)
    assert resumed.counters == straight.counters and resumed.window.loss == straight.window.loss
    assert torch.equal(resumed.window.sums, straight.window.sums)
    for a, b in zip(resumed.heads.parameters(), straight.heads.parameters(), strict=True):
        assert torch.equal(a, b)


def test_another_run_is_refused_naming_what_differs(tmp_path):
    path = tmp_path / "training" / "checkpoint.safetensors"
    save_state(path, make_state(1), IDENTITY)
    with pytest.raises(ValueError, match=r"optim\.lr was 0\.1, now 0\.2.*to start over") as caught:
        load_state(path, make_state(0), IDENTITY | {"optim.lr": 0.2})
    assert "data fingerprint" not in str(caught.value)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "training" / "checkpoint.safetensors"
    save_state(path, make_state(1), IDENTITY)
    content = path.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], content[:5], b"", b"\x80\x04pickle" * 9):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="no complete checkpoint .*; delete it to start over"):
            load_state(path, make_state(0), IDENTITY)


def test_settings_that_do_not_change_the_heads_may_change():
    config = {"train": {"log_every": 3, "seed": 1, "output_dir": "x"}, "optim": {"lr": 1.0}, "data": {"path": "p"}}
    assert flat_settings(config) == {"train.seed": 1, "optim.lr": 1.0}


def test_metrics_lose_and_repeat_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in range(1, 6):
        metrics.write({"kind": "train", "step": step})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    metrics = MetricsFile(path, 3)
    metrics.write({"kind": "train", "step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_head_metrics_count_targets_outside_the_draft_vocabulary_as_misses():
    sums = torch.tensor([[6.0, 3, 4, 1, 2, 3], [0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    assert head_metrics(sums) == {
        "head_loss": [2.0, 0.0],
        "head_top1": [0.25, 0.0],
        "head_top5": [0.5, 0.0],
        "head_top10": [0.75, 0.0],
        "coverage": 0.75,
    }
