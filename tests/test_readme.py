"""Every command and every piece of Python in the README works as printed, in the order in which it is printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = ("./scripts/quickstart.sh", "./scripts/test.sh", "pip install")  # have tests, or are the test, themselves


def blocks(readme, language):
    return re.findall(rf"```{language}\n(.*?)```", readme, flags=re.DOTALL)


def commands(readme):
    lines = [line for block in blocks(readme, "bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *SCRIPTS))]


@pytest.fixture(scope="module")
def readme(repo_root):
    return (repo_root / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def checkout(repo_root, demo_model_dir, tmp_path_factory):
    """What a fresh clone has, and the demo model that quickstart makes; nothing is written into the repository."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "data", "scripts", "README.md"):
        (folder / name).symlink_to(repo_root / name)
    (folder / "runs").mkdir()
    (folder / "runs" / "demo-model").symlink_to(demo_model_dir)
    return folder


def run(command, folder):
    """As a user's shell would: with every core, unless other processes (a launcher's, other tests) share them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shared = command.startswith("torchrun") or "PYTEST_XDIST_WORKER" in os.environ
    threads = 1 if shared else os.cpu_count()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_readme_works_as_printed(readme, checkout):
    lines, python = commands(readme), blocks(readme, "python")
    assert len(lines) >= 10 and len(python) == 1
    outputs = {line: run(line, checkout) for line in lines}
    compared = next(output for line, output in outputs.items() if "--compare" in line)
    assert "NO" not in compared
    output = run(f"{sys.executable} - <<'PY'\n{python[0]}\nPY", checkout)
    assert output.startswith("Gravity is a fundamental concept")


def test_files_that_the_readme_links_exist(readme, repo_root):
    links = re.findall(r"\]\((?!http)([^)#]+)\)|src=\"(?!http)([^\"]+)\"", readme)
    assert len(links) > 8
    for link in links:
        assert (repo_root / "".join(link)).exists(), link


def test_every_command_of_the_program_is_in_the_readme(readme):
    used = {tuple(shlex.split(line, comments=True)[1:3]) for line in commands(readme) if line.startswith("medusa ")}
    names = {first for first, _ in used} | {f"{first} {second}" for first, second in used}
    assert {"distill", "train", "eval", "calibrate", "generate", "bench"} <= names
    assert {"inspect data", "inspect run", "inspect heads", "inspect tree"} <= names
