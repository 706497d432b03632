"""Runs in processes of their own: killed, asked to stop, shared by two; the heads that come out are the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from medusa.train.run import load_config, train

STEPS = 300


def launch(config, *overrides, launcher=(sys.executable,)):
    command = [*launcher, "-m", "medusa", "train", "--config", str(config), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(folder, step, process):
    """Until the run has written the metrics of `step`."""
    path = folder / "training" / "metrics.jsonl"
    while process.poll() is None:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if sum(line.endswith("\n") for line in lines) >= step:
            return
        time.sleep(0.005)
    pytest.fail(f"the run ended before step {step}: {process.communicate()[1]}")


def train_losses(folder):
    lines = (folder / "training" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return [record["step"] for record in records], [record["loss"] for record in records]


@pytest.fixture
def config(config_file):
    settings = {"optim__epochs": 1000, "optim__max_steps": STEPS, "train__save_every": 7, "optim__batch_size": 2}
    return lambda out, **more: config_file(out, **(settings | more))


@pytest.mark.parametrize("cached", [False, True])
def test_after_a_kill_the_run_ends_bitwise_the_same(config, tmp_path, cached):
    more = {"train__cache_hidden_states": cached}
    straight = train(load_config(config("straight", **more)))
    for step in (20, 100):  # twice: once early, once in the continuation
        process = launch(config("killed", **more))
        wait_for_step(tmp_path / "killed", step, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "killed" / "config.json").exists()
    resumed = train(load_config(config("killed", **more)))
    assert (resumed.steps, resumed.tokens, resumed.labels) == (STEPS, straight.tokens, straight.labels)
    weights = [(tmp_path / out / "heads.safetensors").read_bytes() for out in ("straight", "killed")]
    assert weights[0] == weights[1]
    assert train_losses(tmp_path / "killed") == train_losses(tmp_path / "straight")


@pytest.mark.slow
def test_twenty_kills_at_random_moments_leave_no_trace(config, tmp_path):
    train(load_config(config("straight")))
    context = multiprocessing.get_context("forkserver")  # children start with everything imported
    context.set_forkserver_preload(["medusa.train.run", "transformers.models.llama.modeling_llama"])
    choose, step, metrics = random.Random(0), 0, tmp_path / "killed" / "training" / "metrics.jsonl"
    for _ in range(20):
        step += choose.randint(1, 20)
        process = context.Process(target=train, args=(load_config(config("killed")),))
        process.start()
        while process.is_alive() and (not metrics.exists() or metrics.read_bytes().count(b"\n") < step):
            time.sleep(0.002)
        time.sleep(choose.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    train(load_config(config("killed")))
    weights = [(tmp_path / out / "heads.safetensors").read_bytes() for out in ("straight", "killed")]
    assert weights[0] == weights[1]
    assert train_losses(tmp_path / "killed") == train_losses(tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_says_how_to_continue(config, tmp_path, number):
    process = launch(config("out"), "train.save_every=100000")
    wait_for_step(tmp_path / "out", 10, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "saved in" in errors and "run the same command again to continue" in errors
    steps, _ = train_losses(tmp_path / "out")
    resumed = train(load_config(config("out"), ["train.save_every=100000"]))
    assert resumed.steps == STEPS
    all_steps, _ = train_losses(tmp_path / "out")
    assert all_steps == list(range(1, STEPS + 1)) and all_steps[: len(steps)] == steps


def test_two_processes_train_like_one_with_twice_the_batch(config_file, tmp_path):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    settings = {"optim__epochs": 3, "heads__lm_head": "own"}
    process = launch(config_file("two", optim__batch_size=3, **settings), launcher=launcher)
    train(load_config(config_file("one", optim__batch_size=6, **settings)))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    one, two = train_losses(tmp_path / "one"), train_losses(tmp_path / "two")
    assert one[0] == two[0] and len(one[0]) > 15
    assert one[1] == pytest.approx(two[1], abs=1e-5)
    summaries = [json.loads((tmp_path / out / "training" / "summary.json").read_text()) for out in ("one", "two")]
    for name in ("tokens", "labels", "steps"):
        assert summaries[0][name] == summaries[1][name]
    assert summaries[0]["held_out"]["head_loss"] == pytest.approx(summaries[1]["held_out"]["head_loss"], abs=1e-4)


def test_begun_by_two_processes_it_ends_in_one(config, tmp_path):
    """The same batches, twice as many of each on the one process; any other split is refused with the numbers."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    process = launch(config("moved", optim__batch_size=2), launcher=launcher)
    wait_for_step(tmp_path / "moved", 40, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert "run the same command again to continue" in errors
    with pytest.raises(ValueError, match=r"conversations per batch .* was 4, now 2"):
        train(load_config(config("moved", optim__batch_size=2)))
    train(load_config(config("moved", optim__batch_size=4)))
    train(load_config(config("straight", optim__batch_size=4)))
    moved, straight = train_losses(tmp_path / "moved"), train_losses(tmp_path / "straight")
    assert moved[0] == straight[0] == list(range(1, STEPS + 1))
    assert moved[1] == pytest.approx(straight[1], abs=1e-4)


def test_wrong_input_is_one_line_and_status_2(config_file):
    process = launch(config_file("out"), "optim.lrr=1")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and output == ""
    assert errors.startswith("error: ") and errors.count("\n") == 1 and "did you mean optim.lr?" in errors
