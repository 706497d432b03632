"""What `medusa train` says when something is in its way: one line, its status; and the run can go on afterwards."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import pytest

from medusa.cli import run
from medusa.train import faults as faults_module
from medusa.train.features import OnlineHidden
from medusa.train.lock import claim_folder, is_held

DiskUsage = namedtuple("DiskUsage", "total used free")
SAVING = {"train__save_every": 3, "optim__epochs": 2}


@pytest.fixture
def medusa_train(capsys):
    """medusa_train(config file) -> (exit status, the error's one line, what else was written to standard error)."""

    def command(path):
        status = run(["train", "--config", str(path)])
        lines = capsys.readouterr().err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == bool(status) and not any("Traceback" in line for line in lines)
        assert not errors or lines[-1] == errors[0]
        return status, "".join(errors), "\n".join(line for line in lines if line not in errors)

    return command


@pytest.fixture
def ends_like_one_never_broken(config_file, medusa_train, read_metrics):
    """check(out): the run in `out`, started again, ends with the losses of a run that nothing has happened to."""

    def check(out):
        assert medusa_train(config_file(out, **SAVING))[0] == 0
        assert medusa_train(config_file("straight", **SAVING))[0] == 0
        broken, straight = ([r["loss"] for r in read_metrics(name)] for name in (out, "straight"))
        assert broken == straight

    return check


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_output_directory_that_cannot_be_one(config_file, tmp_path, medusa_train, place):
    (tmp_path / "file").write_text("mine")
    status, error, _ = medusa_train(config_file("x", train__output_dir=str(tmp_path / place)))
    assert status == 2 and f"{tmp_path / place}: got a place that cannot be written to" in error
    assert "set another train.output_dir" in error and (tmp_path / "file").read_text() == "mine"


def test_an_output_directory_without_permission(config_file, tmp_path, medusa_train, monkeypatch):
    """Whoever runs the tests as root may write everywhere, so the refusal is the system's word only by name."""
    opened = os.open

    def refuse(path, flags, *mode, **options):
        if str(path).endswith("training/lock"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    status, error, _ = medusa_train(config_file())
    assert status == 2 and f"(Permission denied: {tmp_path}/out/training/lock)" in error


def test_two_runs_at_once_in_one_directory(config_file, tmp_path, medusa_train):
    """The second is refused; a first that was killed holds nothing."""
    folder = tmp_path / "out" / "training"
    code = (
        "import sys, time, pathlib; from medusa.train.lock import claim_folder\n"
        "with claim_folder(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    status, error, _ = medusa_train(config_file())
    assert status == 2 and f"another run is training into (process {holder.pid} on " in error
    assert "wait for that run, stop it, or set another train.output_dir" in error
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert medusa_train(config_file())[0] == 0


def test_no_free_disk_at_the_start(config_file, tmp_path, medusa_train, monkeypatch):
    monkeypatch.setattr(faults_module.shutil, "disk_usage", lambda path: DiskUsage(10**9, 10**9, 1000))
    status, error, _ = medusa_train(config_file())
    assert status == 2 and "got 0.000 GB of free disk, expected 0.0" in error and "for checkpoints and heads" in error
    assert not (tmp_path / "out" / "training" / "metrics.jsonl").exists()


def test_the_room_asked_for_is_the_room_taken(config_file, tmp_path, medusa_train, monkeypatch):
    """With exactly as much free as all files take, and one more checkpoint beside the one it replaces, it runs."""
    assert medusa_train(config_file("first"))[0] == 0
    folder = tmp_path / "first"
    checkpoint = (folder / "training" / "checkpoint.safetensors").stat().st_size
    taken = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    monkeypatch.setattr(faults_module.shutil, "disk_usage", lambda path: DiskUsage(0, 0, taken + 2 * checkpoint))
    assert medusa_train(config_file("second"))[0] == 0
    monkeypatch.setattr(faults_module.shutil, "disk_usage", lambda path: DiskUsage(0, 0, taken - checkpoint // 2))
    assert medusa_train(config_file("third"))[0] == 2


def test_a_full_disk_under_the_metrics(config_file, tmp_path, medusa_train, monkeypatch, ends_like_one_never_broken):
    from medusa.train.metrics import MetricsFile

    write = MetricsFile.write

    def full(self, record):
        if record["step"] == 5:
            self.path.rename(self.path.with_suffix(".kept"))
            self.path.symlink_to("/dev/full")  # takes nothing, as a full disk
        return write(self, record)

    monkeypatch.setattr(MetricsFile, "write", full)
    status, error, _ = medusa_train(config_file("full", **SAVING))
    assert status == 1 and "metrics.jsonl: cannot be written (No space left on device); the last checkpoint is" in error
    monkeypatch.undo()
    path = tmp_path / "full" / "training" / "metrics.jsonl"
    path.with_suffix(".kept").replace(path)
    ends_like_one_never_broken("full")


def test_data_that_vanished_before_the_run_went_on(config_file, tmp_path, chat_file, medusa_train, break_at):
    data = shutil.copy(chat_file, tmp_path / "data.jsonl")
    config = config_file("out", data__path=str(data), **SAVING)
    break_at(5)
    assert medusa_train(config)[:2] == (1, "error: broken off")
    checkpoint = (tmp_path / "out" / "training" / "checkpoint.safetensors").read_bytes()
    data.rename(tmp_path / "moved.jsonl")
    status, error, _ = medusa_train(config)
    assert status == 2 and f"{data}: got no such file" in error
    assert (tmp_path / "out" / "training" / "checkpoint.safetensors").read_bytes() == checkpoint
    moved = config_file("out", data__path=str(tmp_path / "moved.jsonl"), **SAVING)  # it may lie elsewhere
    assert medusa_train(moved)[0] == 0


def test_data_that_changed_before_the_run_went_on(config_file, tmp_path, chat_file, medusa_train, break_at):
    data = shutil.copy(chat_file, tmp_path / "data.jsonl")
    config = config_file("out", data__path=str(data), heads__draft_vocab_size=None, **SAVING)
    break_at(5)
    assert medusa_train(config)[0] == 1
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    status, error, _ = medusa_train(config)
    assert status == 2 and "data fingerprint was " in error and "set them back to continue" in error


def test_a_loss_that_is_no_number_leaves_the_checkpoint_to_go_on_from(
    config_file, tmp_path, medusa_train, monkeypatch, ends_like_one_never_broken
):
    hidden, calls = OnlineHidden.hidden, []

    def poisoned(self, indices, batch):
        calls.append(indices)
        return hidden(self, indices, batch) * (math.nan if len(calls) == 5 else 1)

    monkeypatch.setattr(OnlineHidden, "hidden", poisoned)
    status, error, _ = medusa_train(config_file("nan", **SAVING))
    assert status == 1 and "got loss nan" in error and "stopped before the optimizer step" in error
    ends_like_one_never_broken("nan")


def test_out_of_memory(config_file, medusa_train, break_at):
    break_at(2, MemoryError())
    status, error, _ = medusa_train(config_file())
    assert status == 1 and "out of memory while training; lower optim.batch_size" in error


def test_damaged_metrics_are_a_warning_not_an_end(
    config_file, tmp_path, medusa_train, break_at, ends_like_one_never_broken
):
    """Of lines that are trained again nothing is lost; those of steps before are told of."""
    break_at(6)
    assert medusa_train(config_file("torn", **SAVING))[0] == 1
    path = tmp_path / "torn" / "training" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "\0" * 40, '{"step": "x"}', *lines[3:]]) + '\n{"kind": "tr')
    status, _, others = medusa_train(config_file("torn", **SAVING))
    assert status == 0 and f"warning: {path}: 2 damaged line(s) left out (4, 5)" in others
    ends_like_one_never_broken("torn")


def test_a_damaged_checkpoint(config_file, tmp_path, medusa_train, break_at):
    break_at(5)
    assert medusa_train(config_file("out", **SAVING))[0] == 1
    path = tmp_path / "out" / "training" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    status, error, _ = medusa_train(config_file("out", **SAVING))
    assert status == 2 and f"{path}: got a file that is no complete checkpoint" in error


def test_a_base_without_write_permission_is_all_it_needs(config_file, tmp_path, tiny_base_dir, medusa_train):
    base = shutil.copytree(tiny_base_dir, tmp_path / "base")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in base.rglob("*")}
    for path in (*base.rglob("*"), base):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert medusa_train(config_file("out", model__base=str(base)))[0] == 0
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in base.rglob("*")} == before
    base.chmod(0o755)


def test_the_lock_goes_with_the_run(tmp_path):
    folder = tmp_path / "training"
    with claim_folder(folder):
        assert f"process {os.getpid()} on " in (folder / "lock").read_text() and is_held(folder)
        with pytest.raises(ValueError, match="another run is training into"), claim_folder(folder):
            pass
    assert not is_held(folder)
    with claim_folder(folder):
        pass
