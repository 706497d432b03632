"""Whole runs on a tiny base: the losses, what is left untouched, what comes out, and what stops a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from medusa.base_model import load_base_model
from medusa.checkpoint import check_base, load_heads
from medusa.fingerprint import fingerprint, full_fingerprint
from medusa.train import prepare as prepare_module
from medusa.train.features import OnlineHidden
from medusa.train.loop import NonFiniteLoss
from medusa.train.run import train
from tiny_models import save_tiny_base

GOLDEN = Path(__file__).with_name("golden_losses.json")


def losses(records):
    return [record["loss"] for record in records]


def heads_of(folder):
    return load_heads(folder)[0].state_dict()


def same_heads(first, second, **tolerance):
    first, second = heads_of(first), heads_of(second)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], **(tolerance or {"rtol": 0, "atol": 0}))


def test_golden_losses(make_config, read_metrics):
    """The first losses of two designs, as text. After a meant change: delete the file's entry, run, look, commit."""
    golden = json.loads(GOLDEN.read_text())
    for lm_head in ("own", "shared"):
        train(make_config(lm_head, heads__lm_head=lm_head, optim__epochs=2, optim__max_steps=10))
        got = losses(read_metrics(lm_head))
        assert len(got) == 10
        assert got == pytest.approx(golden[lm_head], abs=2e-4)  # other processors round otherwise


def test_heads_learn_and_come_out_whole(make_config, tmp_path, tiny_base_dir, read_metrics):
    result = train(make_config(optim__epochs=12, train__eval_every=30))
    records = read_metrics()
    assert losses(records)[-1] < 0.8 * losses(records)[0]
    assert [record["step"] for record in records] == list(range(1, result.steps + 1))
    assert {record["epoch"] for record in records} == set(range(12))
    assert result.tokens == records[-1]["tokens"] and result.labels == records[-1]["labels"] > 0
    assert [r["step"] for r in read_metrics(kind="eval")] == [30, 60, 90, result.steps]
    best = max(reversed(read_metrics(kind="eval")), key=lambda record: record["tau_16_nodes"])
    assert result.held_out["head_top1"] == best["head_top1"]
    heads, info = load_heads(tmp_path / "out")
    base = load_base_model(str(tiny_base_dir))
    check_base(info, fingerprint(base.model), base.name)
    assert heads.config.num_layers == 2 and heads.dtype == torch.float32
    training = tmp_path / "out" / "training"
    assert json.loads((training / "summary.json").read_text())["stop_reason"] == "all steps done"
    assert yaml.safe_load((training / "config.yaml").read_text())["optim"]["epochs"] == 12
    [start] = json.loads((training / "record.json").read_text())["starts"]
    assert start["versions"]["torch"] == torch.__version__ and start["command"]


@pytest.mark.parametrize("objective", ["distillation", "lk_hybrid", "lk_log"])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_learn_from_the_base_itself(make_config, read_metrics, objective, lm_head):
    """The same whether hidden states, and so the teacher's, are computed now or were before."""
    settings = {"loss__objective": objective, "heads__lm_head": lm_head, "optim__epochs": 8}
    train(make_config("now", **settings))
    now = losses(read_metrics("now"))
    assert sum(now[-5:]) < 0.95 * sum(now[:5])
    train(make_config("before", train__cache_hidden_states=True, **settings))
    assert losses(read_metrics("before")) == pytest.approx(now, abs=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_base_is_left_as_it_was(make_config, tmp_path, monkeypatch, tied):
    """lm_head included, which heads project through and which freezing `model.base_model` alone would leave out."""
    bases = []

    def load(*args, **kwargs):
        bases.append(load_base_model(*args, **kwargs))
        return bases[-1]

    monkeypatch.setattr(prepare_module, "load_base_model", load)
    folder = save_tiny_base(tmp_path / "base", tie_word_embeddings=tied)
    train(make_config(model__base=str(folder)))
    [base] = bases
    assert full_fingerprint(base.model) == full_fingerprint(load_base_model(str(folder)).model)
    assert not base.model.training
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in base.model.parameters())


def test_a_base_that_changes_is_noticed_and_no_heads_are_written(make_config, tmp_path, monkeypatch):
    hidden = OnlineHidden.hidden

    def meddle(self, indices, batch):
        self.base.model.lm_head.weight.data[5, 5] += 1e-3
        return hidden(self, indices, batch)

    monkeypatch.setattr(OnlineHidden, "hidden", meddle)
    with pytest.raises(RuntimeError, match="changed during training; no heads were written"):
        train(make_config())
    assert not (tmp_path / "out" / "config.json").exists()


def test_accumulated_micro_batches_are_one_batch(make_config, tmp_path, read_metrics):
    """Of very different label counts, which a mean of means would get wrong."""
    plain = {"data__group_by_length": False, "optim__epochs": 3}  # grouping makes other batches of other sizes
    train(make_config("whole", optim__batch_size=8, **plain))
    train(make_config("parts", optim__batch_size=2, optim__gradient_accumulation=4, **plain))
    assert losses(read_metrics("whole")) == pytest.approx(losses(read_metrics("parts")), abs=1e-5)


def test_hidden_states_computed_once_give_the_same_training(make_config, tmp_path, read_metrics):
    train(make_config("online", optim__epochs=3))
    train(make_config("cached", optim__epochs=3, train__cache_hidden_states=True))
    assert losses(read_metrics("cached")) == pytest.approx(losses(read_metrics("online")), abs=1e-5)
    same_heads(tmp_path / "online", tmp_path / "cached", rtol=0, atol=1e-4)
    assert not (tmp_path / "cached" / "training" / "features").exists()
    train(make_config("kept", train__cache_hidden_states=True, train__keep_hidden_states=True))
    assert (tmp_path / "kept" / "training" / "features").exists()


def test_bfloat16_trains_like_float32(make_config, tmp_path, read_metrics):
    train(make_config("full"))
    for cached in (False, True):
        train(make_config(f"half{cached}", model__dtype="bfloat16", train__cache_hidden_states=cached))
        assert losses(read_metrics(f"half{cached}")) == pytest.approx(losses(read_metrics("full")), rel=0.05)
        assert load_heads(tmp_path / f"half{cached}")[0].dtype == torch.float32


def test_batches_without_labels_are_skipped_and_counted(make_config, tmp_path, read_metrics):
    """No position two before the only answer token: nothing to learn, and a mean over nothing is not a number."""
    path = tmp_path / "ids.jsonl"
    path.write_text(
        '{"prompt_ids": [5], "answer_ids": [6]}\n' * 8 + '{"prompt_ids": [5, 6], "answer_ids": [7, 8, 9]}\n'
    )
    result = train(
        make_config(data__path=str(path), data__holdout_fraction=0.0, optim__batch_size=1, heads__draft_vocab_size=None)
    )
    assert (result.steps, result.empty_steps, result.labels) == (9, 8, 6)
    assert sum(record["loss"] > 0 for record in read_metrics()) == 1
    assert all(tensor.isfinite().all() for tensor in heads_of(tmp_path / "out").values())
    assert result.held_out is None


def test_a_loss_that_is_no_number_stops_before_the_step_and_says_where(make_config, tmp_path, monkeypatch):
    hidden, calls, seen = OnlineHidden.hidden, [], {}

    def poisoned(self, indices, batch):
        calls.append(list(indices))
        return hidden(self, indices, batch) * (math.nan if len(calls) == 4 else 1)

    step = torch.optim.AdamW.step

    def counted(self, *args, **kwargs):
        seen["steps"] = seen.get("steps", 0) + 1
        return step(self, *args, **kwargs)

    monkeypatch.setattr(OnlineHidden, "hidden", poisoned)
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    with pytest.raises(NonFiniteLoss, match="epoch 0, step 3") as caught:
        train(make_config())
    assert f"(examples {', '.join(map(str, calls[3]))})" in str(caught.value)
    assert seen["steps"] == 3 and not (tmp_path / "out" / "config.json").exists()


def test_a_time_limit_ends_the_run_and_its_schedule(make_config, read_metrics):
    result = train(make_config(train__time_limit_s=0.2, optim__epochs=100000))
    assert result.stop_reason == "time limit" and result.seconds >= 0.2
    rates = [record["lr"] for record in read_metrics()]
    assert rates[-1] < 0.2 * max(rates) and rates[0] < max(rates)


def test_finished_and_foreign_output_directories(make_config, tmp_path):
    first = train(make_config())
    before = (tmp_path / "out" / "heads.safetensors").stat().st_mtime_ns
    assert train(make_config()) == first
    assert (tmp_path / "out" / "heads.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"optim\.lr was 0\.01, now 0\.02"):
        train(make_config(optim__lr=0.02))
    (tmp_path / "out" / "training" / "checkpoint.safetensors").unlink()
    with pytest.raises(ValueError, match="got heads already, of no run that can be continued"):
        train(make_config())


def test_conversations_beyond_the_base_positions_are_refused(make_config, tmp_path):
    """Rather than stretching the base's rotary embedding behind the user's back."""
    folder = save_tiny_base(tmp_path / "short", max_position_embeddings=32)
    with pytest.raises(ValueError, match="expected at most the 32 positions"):
        train(make_config(model__base=str(folder)))


def test_training_needs_nothing_that_is_not_installed_with_it():
    code = "import sys, medusa.train.run; print([m for m in ('deepspeed', 'wandb', 'peft') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
