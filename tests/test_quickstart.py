"""Quickstart's stages: each once and in order, none twice, the interrupted one again and all behind it."""

from __future__ import annotations

import os
import subprocess

import pytest

STUB = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in *"$BREAK_AT"*) exit 9;; esac
"""


@pytest.fixture
def checkout(repo_root, tmp_path):
    """The script with an environment of stubs that write down what they were asked to do."""
    (tmp_path / "scripts").mkdir()
    for name, content in (
        ("scripts/quickstart.sh", (repo_root / "scripts" / "quickstart.sh").read_text()),
        ("scripts/setup_env.sh", STUB),
        ("venv/bin/python", STUB),
        ("venv/bin/medusa", STUB),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o755)
    return tmp_path


def run(checkout, break_at="nothing breaks", arguments=()):
    """(exit status, what was called)."""
    calls = checkout / "calls"
    calls.write_text("")
    env = os.environ | {"VENV": "venv", "CALLS": str(calls), "BREAK_AT": break_at}
    done = subprocess.run([checkout / "scripts" / "quickstart.sh", *arguments], env=env, capture_output=True, text=True)
    return done.returncode, [" ".join(line.split()[:3]) for line in calls.read_text().splitlines()]


STAGES = [
    "setup_env.sh train,demo,plot",
    "python scripts/demo_model.py --out",
    "medusa distill --base",
    "python scripts/fit_data.py --config",
    "medusa train --config",
    "medusa calibrate --heads",
    "medusa inspect tree",
    "medusa bench --heads",
    "medusa generate --heads",
]


def test_every_stage_runs_once_and_in_order(checkout):
    assert run(checkout) == (0, STAGES)


def test_finished_stages_are_not_redone(checkout):
    run(checkout)
    assert run(checkout) == (0, [STAGES[0], STAGES[-1]])


@pytest.mark.parametrize("broken", range(1, 8))
def test_after_a_failure_it_goes_on_where_it_stopped(checkout, broken):
    status, calls = run(checkout, break_at=" ".join(STAGES[broken].split()[1:]))
    assert status == 9 and calls == STAGES[: broken + 1]
    assert run(checkout) == (0, [STAGES[0], *STAGES[broken:]])


def test_a_stage_that_is_redone_has_all_behind_it_redone(checkout):
    run(checkout)
    (checkout / "runs" / "quickstart" / ".finished-train").unlink()
    assert run(checkout)[1] == [STAGES[0], *STAGES[4:]]


def test_shipped_heads_are_taken_instead_of_trained(checkout, repo_root):
    heads = checkout / "heads" / "smollm2-135m-instruct"
    heads.mkdir(parents=True)
    for name in ("config.json", "heads.safetensors"):
        (heads / name).write_bytes((repo_root / "heads" / heads.name / name).read_bytes()[:100])
    status, calls = run(checkout, arguments=["--pretrained"])
    assert status == 0
    assert calls == [call for call in STAGES if "fit_data" not in call and "medusa train" not in call]
    assert (checkout / "runs" / "pretrained" / "heads" / "heads.safetensors").stat().st_size == 100


def test_an_unknown_argument_is_refused_before_anything_is_done(checkout):
    assert run(checkout, arguments=["--pretrain"]) == (2, [])
