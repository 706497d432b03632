"""Trackers for real, without a network: what they keep is what metrics.jsonl holds, over an interruption too."""

from __future__ import annotations

import json
import sqlite3
import warnings

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medusa.train import trackers as trackers_module
from medusa.train.run import train
from medusa.train.trackers import flatten


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is first imported


def scalars(folder, name):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_trackers_keep_what_the_metrics_hold_and_go_on_with_the_same_run(make_config, tmp_path, break_at, read_metrics):
    config = make_config(
        train__trackers=["wandb", "tensorboard", "trackio"],
        train__tracker_project="tiny",
        train__save_every=3,
        train__eval_every=4,
    )
    break_at(6)
    with pytest.raises(RuntimeError, match="broken off"):
        train(config)
    train(config)
    training = tmp_path / "out" / "training"
    run_id = json.loads((training / "record.json").read_text())["run_id"]
    records, evaluations = read_metrics(), read_metrics(kind="eval")
    assert len(records) > 6 and len(evaluations) > 1

    folder = training / "tensorboard" / "tiny"
    for name in ("loss", "tokens_per_second", "peak_memory_bytes"):
        assert scalars(folder, f"train/{name}") == [(r["step"], pytest.approx(r[name])) for r in records]
    for name in ("head_top1", "head_top5", "head_loss"):
        assert scalars(folder, f"eval/{name}/2") == [(e["step"], pytest.approx(e[name][2])) for e in evaluations]
    assert scalars(folder, "eval/tau_16_nodes")[-1][1] == pytest.approx(evaluations[-1]["tau_16_nodes"])
    [hyperparameters] = folder.rglob("hparams.yml")  # given once, by the start
    assert "optim.lr: 0.01" in hyperparameters.read_text()

    runs = sorted((training / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(runs) == 2
    kept = [path.read_bytes() for path in runs]
    assert b"optim.lr" in kept[0] and b"train/head_top1/0" in kept[0] and b"eval/tau_16_nodes" in kept[1]
    for record in records:
        assert repr(record["loss"]).encode() in kept[record["step"] > 3]

    with sqlite3.connect(tmp_path / "trackio" / "tiny.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {f"{tmp_path.name}/out-{run_id}"}
    losses = {step: values["train/loss"] for _, step, text in rows if "train/loss" in (values := json.loads(text))}
    assert losses == {record["step"]: record["loss"] for record in records}


def test_a_tracker_that_fails_is_reported_once_and_training_goes_on(make_config, tmp_path, monkeypatch, read_metrics):
    from accelerate.tracking import TensorBoardTracker

    log, steps = TensorBoardTracker.log, []

    def failing(self, values, step=None, **options):
        steps.append(step)
        if step > 2:
            raise ConnectionError("no route to host\nand more")
        return log(self, values, step, **options)

    monkeypatch.setattr(TensorBoardTracker, "log", failing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(make_config(train__trackers=["tensorboard"]))
    about = [str(warning.message) for warning in caught if "tracker" in str(warning.message)]
    assert about == [
        "tracker tensorboard failed (no route to host); training goes on without it, all numbers are in metrics.jsonl"
    ]
    assert steps == [1, 2, 3] and len(read_metrics()) > 3
    train(make_config("silent"))
    weights = [(tmp_path / out / "heads.safetensors").read_bytes() for out in ("out", "silent")]
    assert weights[0] == weights[1]


def test_a_tracker_that_is_not_installed_is_an_error_at_once(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers_module, "find_spec", lambda name: None if name == "trackio" else object())
    with pytest.raises(ValueError, match=r"got trackio, which is not installed.*pip install 'medusa-decoding\[track"):
        train(make_config(train__trackers=["wandb", "trackio"]))
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_does_not_start_is_an_error_before_training(make_config, tmp_path):
    (tmp_path / "out" / "training").mkdir(parents=True)
    (tmp_path / "out" / "training" / "tensorboard").write_text("in the way")
    with pytest.raises(RuntimeError, match=r"train\.trackers: tensorboard did not start \(.*leave it out"):
        train(make_config(train__trackers=["tensorboard"]))
    assert not (tmp_path / "out" / "training" / "metrics.jsonl").read_text()


def test_an_unknown_tracker_names_those_that_are_known(make_config):
    with pytest.raises(ValueError, match="'wandb', 'tensorboard' or 'trackio'"):
        make_config(train__trackers=["mlflow"])


def test_flatten_names_numbers_by_their_place():
    record = {"kind": "eval", "step": 3, "loss": 1.5, "grad_norm": None, "head_top1": [0.5, 0.25]}
    record["by_category"] = {"code": {"tau_chain": 2.0}}
    assert flatten(record) == {
        "eval/loss": 1.5,
        "eval/head_top1/0": 0.5,
        "eval/head_top1/1": 0.25,
        "eval/by_category/code/tau_chain": 2.0,
    }
