"""Two processes under each strategy, launched as a user does: the single process's losses, heads and checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from medusa.base_model import load_base_model
from medusa.checkpoint import check_base, load_heads
from medusa.fingerprint import fingerprint
from medusa.train.batching import split_holdout
from medusa.train.config import load_config
from medusa.train.distributed import start_processes
from medusa.train.mixture import Mixture, Part
from medusa.train.run import train
from medusa.train.schedule import StepPlan
from tiny_models import save_tiny_base

WORKER = Path(__file__).with_name("distributed_worker.py")
STRATEGIES = ["ddp", "fsdp2", "zero2", "zero3"]
NUM_STEPS, STOP_AFTER = 20, 10
LAYER_PARAMETERS = 18_560  # of the tiny base's two layers

# What a long run has: clipped gradients, weight decay, accumulation, projections of the heads' own.
LONG = {
    "heads": {"num_heads": 3, "num_layers": 2, "lm_head": "own", "draft_vocab_size": 40},
    "optim": {"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": 0.3, "gradient_accumulation": 2, "epochs": 10},
}
# What else touches the base: its lm_head in heads and targets, tied to its embeddings; hidden states computed
# beforehand, by one process more than by the other; at times a batch of one example, which leaves a process idle.
OTHER = {
    "heads": {"num_heads": 3, "lm_head": "shared"},
    "loss": {"objective": "distillation"},
    "data": {"limit": 30},
    "train": {"eval_every": 2},
}
ONLINE = OTHER | {"optim": {"epochs": 1}}
CACHED = OTHER | {"optim": {"epochs": 2}, "train": {"eval_every": 2, "cache_hidden_states": True}}


def write_config(path, base, data, batch_size, settings):
    """Output goes to the folder of the config's name; `batch_size` is a process's."""
    content = {
        "model": {"base": str(base)},
        "data": {"path": str(data), "max_length": 96, "holdout_fraction": 0.1},
        "optim": {"lr": 1e-2, "max_steps": NUM_STEPS},
        "train": {"output_dir": str(path.with_suffix("")), "log_every": 1, "save_every": STOP_AFTER},
    }
    for section, values in settings.items():
        content[section] = content.get(section, {}) | values
    content["optim"]["batch_size"] = batch_size
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.fixture(scope="module")
def tied_base_dir(tmp_path_factory):
    return save_tiny_base(tmp_path_factory.mktemp("tied-base"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def configs(tiny_base_dir, tied_base_dir, chat_file):
    """configs(folder, number of processes) -> the config files of the same runs by that many."""

    def write(folder, num_processes):
        folder.mkdir(exist_ok=True)
        long = {name: (tiny_base_dir, LONG, 4) for name in ("straight", "stopped", "adopted")}
        runs = long | {"online": (tied_base_dir, ONLINE, 2), "cached": (tied_base_dir, CACHED, 2)}
        return {
            name: write_config(folder / f"{name}.yaml", base, chat_file, size // num_processes, settings)
            for name, (base, settings, size) in runs.items()
        }

    return write


NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def launch(strategy, jobs, *options):
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", f"configs/accelerate/{strategy}.yaml", "--num_processes", "2"]
    command = [*launcher, "--main_process_port", "0", *options, str(WORKER), json.dumps(jobs)]
    root = Path(__file__).resolve().parents[2]  # config files name each other from there
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, cwd=root, env=os.environ | NO_GPU, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the launcher's processes too, which it would leave behind
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.fixture(scope="module")
def alone(configs, tmp_path_factory):
    """The folder of the same runs by a single process; `stopped` is to be continued."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    files = configs(folder, 1)
    jobs = [{"config": files[name]} for name in ("straight", "online", "cached")]
    jobs.append({"config": files["stopped"], "stop_after": STOP_AFTER})
    command = [sys.executable, str(WORKER), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | NO_GPU)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module", params=STRATEGIES)
def together(request, configs, alone, repo_root):
    """(strategy, folder, standard output) of the runs by two processes; `adopted` was begun by the single one."""
    strategy, folder = request.param, alone.with_name(request.param)
    files = configs(folder, 2)
    shutil.copytree(alone / "stopped", folder / "adopted")
    jobs = [{"config": files[name]} for name in ("straight", "adopted", "online", "cached")]
    jobs.append({"config": files["stopped"], "stop_after": STOP_AFTER})
    options = []
    if strategy == "zero3":  # the tiny base is below the size that is worth partitioning
        config = json.loads((repo_root / "configs" / "deepspeed" / "zero3.json").read_text())
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        (folder / "zero3.json").write_text(json.dumps(config))
        options = ["--deepspeed_config_file", str(folder / "zero3.json")]
    done = launch(strategy, jobs, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return strategy, folder, done.stdout


def metrics(folder, kind="train"):
    lines = (folder / "training" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def assert_same_run(folder, reference):
    for name, tolerance in (("loss", 1e-4), ("grad_norm", 1e-4)):
        series = [[record[name] for record in metrics(run)] for run in (folder, reference)]
        assert len(series[0]) > 5 and series[0] == pytest.approx(series[1], abs=tolerance)
    for name in ("tokens", "labels"):
        assert [record[name] for record in metrics(folder)] == [record[name] for record in metrics(reference)]
    taus = [[record["tau_16_nodes"] for record in metrics(run, "eval")] for run in (folder, reference)]
    assert taus[0] and taus[0] == pytest.approx(taus[1], abs=1e-4)
    for file in ("heads.safetensors", "training/checkpoint.safetensors"):
        ours, theirs = load_file(folder / file), load_file(reference / file)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            if name != "window.sums":
                assert tensor.shape == theirs[name].shape and tensor.dtype == theirs[name].dtype
                assert (tensor - theirs[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("name", ["straight", "online", "cached"])
def test_the_single_process_s_losses_and_heads(together, alone, name):
    _, folder, _ = together
    assert_same_run(folder / name, alone / name)
    if name == "straight":
        records = metrics(folder / name)
        assert len(records) == NUM_STEPS and records[0]["loss"] > records[-1]["loss"] + 0.1
        assert max(record["grad_norm"] for record in records) > 2 * LONG["optim"]["max_grad_norm"]


def test_each_process_holds_what_the_strategy_says(together):
    strategy, _, output = together
    held = {"fsdp2": LAYER_PARAMETERS // 2, "zero3": LAYER_PARAMETERS // 2}.get(strategy, LAYER_PARAMETERS)
    assert f"{strategy}: {held:,} of {LAYER_PARAMETERS:,} parameters of base layers each" in output
    elements = json.loads(next(line for line in output.splitlines() if line.startswith("{")))["optimizer_elements"]
    heads = 3 * (2 * (32 * 32 + 32) + 32 * 40)
    assert elements == pytest.approx(
        2 * heads if strategy in ("ddp", "fsdp2") else heads, abs=64
    )  # the rest is padding


def test_begun_by_two_it_ends_in_one_and_the_other_way_round(together, alone, configs):
    _, folder, output = together
    assert [json.loads(line)["end"] for line in output.splitlines() if line.startswith("{")][-1] == "interrupted"
    train(load_config(configs(folder, 1)["stopped"]))
    for name in ("stopped", "adopted"):
        assert_same_run(folder / name, alone / "straight")


def test_heads_load_whole_and_belong_to_the_base(together, tiny_base_dir):
    """Empty tensors are what a partitioned model saves where nobody gathers it."""
    _, folder, _ = together
    heads, info = load_heads(folder / "straight")
    base = load_base_model(str(tiny_base_dir))
    check_base(info, fingerprint(base.model), base.name)
    assert [list(parameter.shape) for parameter in heads.projections.parameters()] == [[40, 32]] * 3
    assert all(parameter.abs().sum() > 0 for parameter in heads.parameters())


def test_the_runs_above_have_a_batch_that_leaves_a_process_idle(configs, tmp_path):
    config = load_config(configs(tmp_path, 2)["online"])
    training, _ = split_holdout(config.data.limit, config.data.holdout_fraction, config.train.seed)
    mixture = Mixture([Part(np.asarray(training), len(training))], config.train.seed)
    plan = StepPlan(mixture, None, config.optim, config.train.seed, 2)
    assert min(len(batch) for step in range(plan.total_steps) for batch in plan.batches(step)) == 1


def test_a_process_that_fails_ends_the_other_with_a_message(configs, tmp_path):
    done = launch("fsdp2", [{"config": configs(tmp_path, 2)["straight"], "fail_at": 3}])
    assert done.returncode != 0
    assert "RuntimeError: made to fail" in done.stderr
    assert re.search(r"process 0 of 2: lost another process.*run the same command again to continue", done.stderr)


def test_deepspeed_that_is_not_installed(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find_spec(name))
    with pytest.raises(ValueError, match=r"got a launch with DeepSpeed .*, expected it to be installed; pip install"):
        start_processes()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FSDP_VERSION", "1", "got fsdp_version 1, expected 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "got fsdp_offload_params true, expected false"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "got fsdp_cpu_ram_efficient_loading true, expected false"),
    ],
)
def test_an_fsdp_launch_that_cannot_be_honoured(monkeypatch, name, value, message):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"launch: {message}; set it in your launch config"):
        start_processes()


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 1}, r"got DeepSpeed zero_optimization\.stage 1, expected 2 or 3"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, r"offload_optimizer\.device cpu, expected none"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, r"offload_param\.device nvme, expected none"),
    ],
)
def test_a_deepspeed_config_that_cannot_be_honoured(zero, message):
    from medusa.train.deepspeed_engine import checked_stage

    with pytest.raises(ValueError, match=message):
        checked_stage({"zero_optimization": zero})


def test_one_file_knows_torch_distributed(repo_root):
    folders = ("medusa", "train", "infer")
    files = [file for folder in folders for file in (repo_root / folder).rglob("*.py")]
    users = [
        file for file in files if re.search(r"torch\.distributed|from torch import .*distributed", file.read_text())
    ]
    assert users == [repo_root / "train" / "distributed.py"]
