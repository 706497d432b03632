"""What is written down of how heads were made."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
import torch

from medusa.train.record import git_commit, read_record, versions
from medusa.train.run import load_config, train


@pytest.fixture
def interrupted(make_config, break_at):
    """A run with a checkpoint of step 3, broken off in the step after; what continues it."""
    break_at(4)
    config = make_config(train__save_every=3)
    with pytest.raises(RuntimeError, match="broken off"):
        train(config)
    return config


def test_a_record_grows_with_each_continuation(interrupted, tmp_path, chat_file, tiny_base_dir):
    path = tmp_path / "out" / "training" / "record.json"
    first = read_record(path)
    assert first.base_model["name"] == str(tiny_base_dir) and len(first.base_model["fingerprint"]) == 64
    assert [source["path"] for source in first.data["sources"]] == [str(chat_file)] and first.data[
        "conversations"
    ] == 40
    assert first.data["held_out"] > 0 and len(first.data["fingerprint"]) == 64
    [start] = first.starts
    assert (start.step, start.num_processes) == (0, 1)
    assert start.command == shlex.join(sys.argv) and start.time.endswith("+00:00") and start.device
    train(interrupted)
    second = read_record(path)
    assert (second.run_id, second.starts[0]) == (first.run_id, start)
    assert [start.step for start in second.starts] == [0, 3]


def test_versions_are_those_of_what_was_used(interrupted, tmp_path):
    found = read_record(tmp_path / "out" / "training" / "record.json").starts[0].versions
    assert found == versions()
    assert found["torch"] == torch.__version__ and {"python", "medusa-decoding", "transformers", "peft"} <= set(found)


def test_the_config_beside_it_can_be_run_again(interrupted, tmp_path):
    assert load_config(tmp_path / "out" / "training" / "config.yaml") == interrupted


@pytest.mark.parametrize("content", ["", "{", "[]", '{"starts": [{}]}', '{"run_id": "x", "starts": []}'])
def test_a_damaged_record_is_set_aside_and_the_run_goes_on(interrupted, tmp_path, content):
    path = tmp_path / "out" / "training" / "record.json"
    path.write_text(content)
    with pytest.warns(UserWarning, match=r"record\.json: got a damaged file .* set aside as record\.json\.damaged"):
        train(interrupted)
    assert path.with_name("record.json.damaged").read_text() == content
    assert [start.step for start in read_record(path).starts] == [3]


def test_the_commit_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]

    def git(*arguments):
        done = subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    assert git_commit() == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert git_commit() == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None


def test_the_record_is_json_that_others_can_read(interrupted, tmp_path):
    content = json.loads((tmp_path / "out" / "training" / "record.json").read_text())
    assert content.keys() == {"run_id", "base_model", "data", "starts"}
