"""Simulated tau during training: the number that decoding will show, and the heads that had the highest."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from medusa.base_model import load_base_model
from medusa.checkpoint import load_heads
from medusa.infer.evaluate import evaluate as evaluate_heads
from medusa.train import loop as loop_module
from medusa.train.batching import split_holdout
from medusa.train.dataset import build_dataset
from medusa.train.run import train


@pytest.fixture
def chats_in_categories(chat_file, tmp_path):
    path = tmp_path / "categories.jsonl"
    records = [json.loads(line) for line in chat_file.read_text().splitlines()]
    lines = [json.dumps(record | {"category": "odd" if i % 2 else "even"}) for i, record in enumerate(records)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("cached", [False, True])
def test_tau_is_what_eval_says_of_the_same_heads(make_config, tmp_path, chats_in_categories, cached):
    settings = {"data__path": str(chats_in_categories), "data__holdout_fraction": 0.4, "optim__epochs": 4}
    config = make_config(train__cache_hidden_states=cached, **settings)
    result = train(config)
    base, (heads, _) = load_base_model(config.model.base), load_heads(tmp_path / "out")
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    examples = build_dataset(config.data.path, base.tokenizer, config.data.max_length).examples
    held_out = split_holdout(len(examples), 0.4, config.train.seed)[1]
    expected = evaluate_heads(base, heads, [examples[i] for i in held_out]).to_dict()
    assert 1 < expected["tau_chain"] < expected["tau_16_nodes"]
    names = ("tau_chain", "tau_16_nodes")
    assert {name: result.held_out[name] for name in names} == pytest.approx({name: expected[name] for name in names})
    assert set(result.held_out["by_category"]) == {"even", "odd"}
    for category, part in expected["by_category"].items():
        assert result.held_out["by_category"][category] == pytest.approx({name: part[name] for name in names})


@pytest.fixture
def scripted_taus(monkeypatch):
    """Evaluations that give these taus, one after the other; each loaded heads' weights are recorded."""

    def script(taus):
        values = iter(taus)

        def evaluate(run):
            metrics = {"tau_16_nodes": next(values), "tau_chain": 1.0}
            run.metrics.write({"kind": "eval", "step": run.state.counters.step, **metrics})
            return metrics

        monkeypatch.setattr(loop_module, "evaluate", evaluate)

    return script


def test_the_heads_with_the_highest_tau_are_kept(make_config, tmp_path, scripted_taus):
    scripted_taus([1.2, 1.5, 1.4, 1.3])
    settings = {"optim__max_steps": 8, "optim__epochs": 8}
    result = train(make_config(train__eval_every=2, **settings))
    assert result.held_out["tau_16_nodes"] == 1.5 and result.steps == 8
    kept = load_file(tmp_path / "out" / "heads.safetensors")
    best = load_file(tmp_path / "out" / "training" / "best.safetensors")
    last = load_file(tmp_path / "out" / "training" / "checkpoint.safetensors")
    name = "blocks.0.0.linear.weight"
    assert torch.equal(kept[name], best[f"heads.{name}"]) and not torch.equal(kept[name], last[f"heads.{name}"])


def test_where_the_last_are_the_best_they_are_kept(make_config, tmp_path, scripted_taus):
    scripted_taus([1.2, 1.5, 1.4, 1.6])
    assert train(make_config(train__eval_every=2, optim__max_steps=8, optim__epochs=8)).held_out["tau_16_nodes"] == 1.6
    kept = load_file(tmp_path / "out" / "heads.safetensors")
    last = load_file(tmp_path / "out" / "training" / "checkpoint.safetensors")
    assert all(torch.equal(tensor, last[f"heads.{name}"]) for name, tensor in kept.items() if name.startswith("blocks"))


def test_patience_ends_a_run_whose_tau_no_longer_rises(make_config, scripted_taus):
    scripted_taus([1.2, 1.5, 1.4, 1.5, 1.4, 1.4])
    result = train(make_config(train__eval_every=2, train__patience=2, optim__max_steps=100, optim__epochs=100))
    assert result.steps == 8 and result.stop_reason == "tau has not risen for 2 evaluations"
    assert result.held_out["tau_16_nodes"] == 1.5


def test_of_equal_heads_the_later_are_kept(make_config, tmp_path, scripted_taus):
    """All are equal where no held-out answer is long enough to count."""
    scripted_taus([1.0, 1.0, 1.0, 1.0])
    train(make_config(train__eval_every=2, optim__max_steps=8, optim__epochs=8))
    kept = load_file(tmp_path / "out" / "heads.safetensors")
    last = load_file(tmp_path / "out" / "training" / "checkpoint.safetensors")
    assert torch.equal(kept["blocks.0.0.linear.weight"], last["heads.blocks.0.0.linear.weight"])


def test_patience_without_evaluations_is_refused(make_config):
    with pytest.raises(ValueError, match="expected patience to come with eval_every"):
        make_config(train__patience=2)
