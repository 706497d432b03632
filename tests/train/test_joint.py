"""Medusa-2: gradients against the obvious objective, what is saved, and that decoding uses it."""

from __future__ import annotations

import json
import math
import shutil
import sys
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file

from medusa import MedusaModel
from medusa.base_model import load_base_model
from medusa.checkpoint import load_heads
from medusa.fingerprint import full_fingerprint
from medusa.infer import generate
from medusa.infer.methods import StockModel
from medusa.infer.show_heads import show_heads
from medusa.train import run as run_module
from medusa.train.batching import collate
from medusa.train.config import JointConfig, load_config
from medusa.train.loop import _accumulate
from medusa.train.run import train
from medusa.train.schedule import learning_rates, ramp

JOINT = {"joint__rank": 4, "joint__warmup": 0.5, "joint__heads_weight": 0.3}
HEADS, WEIGHTS = 3, [1.0, 0.8, 0.64]


# ---- schedule


def test_the_pull_on_the_base_rises_after_the_heads_were_trained_alone():
    joint = JointConfig(rank=4, start=0.4, warmup=0.2)
    assert ramp(joint, 0.39) == 0 and ramp(joint, 0.5) == pytest.approx(math.sin(math.pi / 4))
    assert ramp(joint, 0.6) == ramp(joint, 1.0) == 1
    assert ramp(JointConfig(), 1.0) == 0


def test_the_adapter_learns_at_a_part_of_the_heads_rate(make_config):
    config = make_config(joint__rank=4, joint__start=0.5, joint__warmup=0.1, joint__head_lr_multiple=5.0)
    assert learning_rates(config, 0.4)["adapter"] == 0
    rates = learning_rates(config, 0.8)
    assert rates["adapter"] == pytest.approx(rates["heads"] / 5)
    assert learning_rates(make_config(), 0.8).keys() == {"heads"}


# ---- the objective


class Stop(Exception):
    pass


def prepared(config, monkeypatch):
    """A Run as `train` makes it, stopped before the first step."""
    runs = []

    def stop(run):
        runs.append(run)
        raise Stop

    monkeypatch.setattr(run_module, "train_loop", stop)
    with pytest.raises(Stop):
        train(config)
    return runs[0]


def obvious_loss(run, indices, ramp):
    """K * (sum of the base's losses) + K * lambda_0 * sum_k weight_k * (sum of head k's losses), all logits at once."""
    batch, base = collate([run.examples[i] for i in indices]), run.joint.base
    hidden = base.model.base_model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    logits = base.finish_logits(base.model.get_output_embeddings()(hidden))
    ids, mask = batch.input_ids, batch.loss_mask

    def loss(logits, targets, ahead):
        wanted = targets[:, ahead:].masked_fill(~mask[:, ahead:], -100).masked_fill(targets[:, ahead:] < 0, -100)
        return F.cross_entropy(logits[:, :-ahead].flatten(0, 1), wanted.flatten(), reduction="sum")

    if run.joint.teacher is None:
        total = HEADS * loss(logits, ids, 1)
    else:
        with torch.no_grad(), run.joint.adapter.peft_model.disable_adapter():
            before = base.model(ids, attention_mask=batch.attention_mask).logits.softmax(-1)
        total = -HEADS * (before[:, :-1] * logits[:, :-1].log_softmax(-1)).sum(-1)[mask[:, 1:]].sum()
    for k, weight in enumerate(WEIGHTS):
        scores = run.state.heads.project(run.state.heads.blocks[k](hidden), k)
        total = total + HEADS * ramp * 0.3 * weight * loss(scores, run.base_to_draft[ids], k + 2)
    return total


@pytest.mark.parametrize("base_loss", ["data", "self"])
def test_gradients_of_the_adapter_are_those_of_the_obvious_objective(make_config, monkeypatch, base_loss):
    config = make_config(**JOINT, joint__base_loss=base_loss, loss__num_target_tokens=10_000, loss__chunk_size=7)
    run, ramp_now = prepared(config, monkeypatch), 0.7
    torch.manual_seed(0)
    for parameter in run.state.parameters():  # untrained, half of LoRA's gradients are zero
        torch.nn.init.normal_(parameter, std=0.1)
    _accumulate(run, ramp_now)
    got = {name: p.grad.clone() for name, p in run.state.adapter.named_parameters()}
    run.joint.adapter.peft_model.zero_grad()
    (batch,) = run.plan.batches(0)
    obvious_loss(run, batch, ramp_now).backward()
    assert got.keys() and max(grad.abs().max() for grad in got.values()) > 1e-2
    for name, parameter in run.state.adapter.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(got[name], parameter.grad, rtol=0, atol=1e-4 * scale + 1e-6)


def test_gradients_of_the_heads_are_those_of_medusa_1(make_config, monkeypatch):
    joint, alone = prepared(make_config(**JOINT), monkeypatch), prepared(make_config("alone"), monkeypatch)
    for run, ramp_now in ((joint, 0.7), (alone, 0.0)):
        _accumulate(run, ramp_now)
    for first, second in zip(joint.state.heads.parameters(), alone.state.heads.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-5, atol=1e-6)


def test_until_its_start_a_joint_run_is_medusa_1(make_config, tmp_path):
    train(make_config("alone", optim__max_steps=4))
    train(make_config("joint", optim__max_steps=4, **{**JOINT, "joint__start": 0.99}))
    alone, joint = (load_file(tmp_path / out / "heads.safetensors") for out in ("alone", "joint"))
    assert all(torch.equal(alone[name], joint[name]) for name in alone)


# ---- what is saved


@pytest.fixture
def trained(make_config, tmp_path):
    result = train(make_config(**JOINT, joint__save_merged=True, optim__epochs=4, optim__lr=0.05, train__eval_every=5))
    return SimpleNamespace(folder=tmp_path / "out", result=result)


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def test_the_adapted_model_is_what_decodes(trained, tiny_base_dir, read_metrics):
    assert math.isfinite(trained.result.held_out["base_loss"]) and "base_loss" in read_metrics()[-1]
    plain = load_base_model(str(tiny_base_dir))
    model = MedusaModel.from_pretrained(trained.folder)
    assert (logits(plain.model, [5, 6, 7]) - logits(model.base.model, [5, 6, 7])).abs().max() > 1e-2

    # The same as peft's own adapter over the plain base, and as the merged model that was written.
    adapted = peft.PeftModel.from_pretrained(plain.model, str(trained.folder / "adapter"))
    torch.testing.assert_close(logits(adapted, [5, 6, 7]), logits(model.base.model, [5, 6, 7]), rtol=0, atol=1e-4)
    merged = MedusaModel.from_pretrained(trained.folder, base=str(trained.folder / "merged"))
    assert merged.adapter is None and model.adapter is not None
    answers = [generate(m, [[5, 6, 7]], max_new_tokens=24)[0].token_ids for m in (model, merged)]
    stock = StockModel.load(model.base, model.adapter).method()([5, 6, 7], 24).token_ids
    assert answers[0] == answers[1] == stock


def test_the_base_itself_is_as_it_was(make_config, tiny_base_dir):
    before = full_fingerprint(load_base_model(str(tiny_base_dir)).model)
    train(make_config(**JOINT, optim__lr=0.05))  # raises where the base without its adapter differs
    assert full_fingerprint(load_base_model(str(tiny_base_dir)).model) == before


def test_another_adapter_is_refused(trained):
    weights = trained.folder / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(ValueError, match="got an adapter of fingerprint .* which the heads were trained with"):
        MedusaModel.from_pretrained(trained.folder)
    weights.unlink()
    with pytest.raises(ValueError, match="got no adapter_model.safetensors"):
        MedusaModel.from_pretrained(trained.folder)


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_another_config_of_the_adapter_is_refused(trained, content):
    path = trained.folder / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"lora_alpha": 320}) if content is None else content)
    with pytest.raises(ValueError, match="fingerprint|expected a peft config"):
        MedusaModel.from_pretrained(trained.folder)


def test_an_adapter_that_the_heads_do_not_name_is_refused(trained):
    path = trained.folder / "config.json"
    config = json.loads(path.read_text())
    del config["adapter"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="got an adapter that config.json does not name"):
        MedusaModel.from_pretrained(trained.folder)


def test_what_is_missing_of_a_finished_run_is_written_again(make_config, tmp_path):
    config = make_config(**JOINT)
    train(config)
    before = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    shutil.rmtree(tmp_path / "out" / "adapter")
    train(config)
    after = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    merging = config.model_copy(update={"joint": config.joint.model_copy(update={"save_merged": True})})
    train(merging)
    assert (tmp_path / "out" / "merged" / "config.json").is_file()


def test_a_broken_adapter_entry_is_refused(trained):
    path = trained.folder / "config.json"
    config = json.loads(path.read_text())
    del config["adapter"]["fingerprint"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="got no adapter.fingerprint"):
        load_heads(trained.folder)


def test_going_on_is_bitwise_the_same(make_config, tmp_path, monkeypatch):
    settings = {**JOINT, "optim__epochs": 2, "train__eval_every": 3, "train__save_every": 5}
    train(make_config("straight", **settings))

    class Killed(BaseException):
        pass

    def killed_in_step_8(run):
        steps = []

        def report(progress, status):
            steps.append(status)
            if len(steps) == 8:
                raise Killed

        run.report = report
        real(run)

    real = run_module.train_loop
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "train_loop", killed_in_step_8)
        with pytest.raises(Killed):
            train(make_config("parts", **settings))
    train(make_config("parts", **settings))
    for name in ("heads.safetensors", "adapter/adapter_model.safetensors"):
        first, second = (load_file(tmp_path / out / name) for out in ("straight", "parts"))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_inspect_heads_shows_the_adapter(trained, capsys):
    show_heads(trained.folder, Console())
    assert "LoRA in adapter/ (Medusa-2)" in capsys.readouterr().out


# ---- what a user can get wrong


def test_cached_states_of_a_base_that_changes_are_refused(config_file):
    with pytest.raises(ValueError, match="adapted base has new hidden states in every step"):
        load_config(config_file(**JOINT, train__cache_hidden_states=True))


def test_modules_that_are_not_there_are_named(make_config):
    with pytest.raises(ValueError, match=r"joint.target_modules: got \['q_proy'\]"):
        train(make_config(joint__rank=4, joint__target_modules=["q_proy"]))


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens", "q_proj"]])
def test_embeddings_and_lm_head_are_not_adapted(make_config, modules):
    with pytest.raises(ValueError, match="adapts the base's embeddings or its lm_head"):
        train(make_config(joint__rank=4, joint__target_modules=modules))


@pytest.mark.parametrize("modules, named", [(["q_proj", "nope"], "'nope'"), ("[", r"'\['")])
def test_module_names_that_match_nothing_are_named(make_config, modules, named):
    with pytest.raises(ValueError, match=f"joint.target_modules: got {named}"):
        train(make_config(joint__rank=4, joint__target_modules=modules))


def test_places_that_are_taken_are_refused_at_the_start(make_config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "merged").write_text("mine")
    with pytest.raises(ValueError, match="merged: got a file, expected a directory"):
        train(make_config(**JOINT))


def test_a_missing_peft_is_named(make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install 'medusa-decoding"):
        train(make_config(**JOINT))
