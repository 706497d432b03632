"""The set-up script's refusals and its shortcut; the real installation is what CI itself runs on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SETTINGS = ("VENV", "PYTHON", "TORCH_VERSION", "TORCH_INSTALL")


def run_setup(repo_root: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    command = ["bash", str(repo_root / "scripts" / "setup_env.sh"), *arguments]
    return subprocess.run(
        command, env={**environment, **settings}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def stand_in_python(folder: Path, log: Path) -> Path:
    """An environment whose `python` only writes down how it was called, but hashes for real."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / ".created").touch()
    program = folder / "bin" / "python"
    program.write_text(
        "#!/usr/bin/env bash\n"
        'if [ "$1" = -m ]; then echo "$@" >>"' + str(log) + '"; exit "${STAND_IN_EXIT:-0}"; fi\n'
        'if [ "$2" = "import pip" ]; then exit 0; fi\n'
        "cksum\n"
    )
    program.chmod(0o755)
    return folder


def test_no_extras_is_a_usage_error(repo_root: Path, tmp_path: Path) -> None:
    done = run_setup(repo_root, VENV=str(tmp_path / "venv"))
    assert done.returncode != 0 and "usage: scripts/setup_env.sh EXTRAS" in done.stderr


def test_a_folder_that_is_no_environment_is_not_cleared(repo_root: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = run_setup(repo_root, "dev", VENV=str(tmp_path))
    assert done.returncode == 2 and "holds something else" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_unusable_python_is_named(repo_root: Path, tmp_path: Path) -> None:
    done = run_setup(repo_root, "dev", VENV=str(tmp_path / "venv"), PYTHON="no-such-python")
    assert done.returncode == 2 and "tried no-such-python, need 3.10 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_torch_comes_first_and_a_second_run_does_nothing(repo_root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    venv = str(stand_in_python(tmp_path / "venv", log))
    assert run_setup(repo_root, "train,dev", VENV=venv, TORCH_INSTALL="torch==2.13.0").returncode == 0
    assert log.read_text().splitlines() == ["-m pip install torch==2.13.0", "-m pip install -e .[train,dev]"]
    again = run_setup(repo_root, "train,dev", VENV=venv, TORCH_INSTALL="torch==2.13.0")
    assert again.returncode == 0 and len(log.read_text().splitlines()) == 2 and again.stdout == ""
    run_setup(repo_root, "train,dev", VENV=venv, TORCH_INSTALL="torch==2.12.0")
    assert log.read_text().splitlines()[2:] == ["-m pip install torch==2.12.0", "-m pip install -e .[train,dev]"]


@pytest.mark.parametrize("settings", [{"TORCH_INSTALL": "torch"}, {}], ids=["given", "default"])
def test_a_failed_step_is_tried_again(repo_root: Path, tmp_path: Path, settings: dict[str, str]) -> None:
    log = tmp_path / "log"
    venv = str(stand_in_python(tmp_path / "venv", log))
    assert run_setup(repo_root, "dev", VENV=venv, STAND_IN_EXIT="1", **settings).returncode != 0
    failed = len(log.read_text().splitlines())
    assert "-e ." not in log.read_text(), "the project must not be installed on top of a failed torch"
    assert run_setup(repo_root, "dev", VENV=venv, **settings).returncode == 0
    assert len(log.read_text().splitlines()) == failed + 2
