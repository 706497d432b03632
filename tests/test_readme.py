"""Every command and every piece of Python in the README works as printed, in the order in which it is printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_server_answers_as_printed(readme, repo_root, demo_model_dir):
    """With the heads that the project ships in place of the reader's."""
    [serve, ask] = "".join(blocks(readme, "console")).splitlines()
    heads = repo_root / "heads" / "smollm2-135m-instruct"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = shlex.split(serve.replace("runs/mine/heads", str(heads)).replace("8000", port))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    server = subprocess.Popen([*command, "--base", str(demo_model_dir)], env=os.environ | {"PATH": path})
    try:
        question = f"{ask.replace('8000', port)} --silent --retry 60 --retry-connrefused --retry-delay 1"
        done = subprocess.run(["bash", "-c", question], capture_output=True, text=True)
        answer = json.loads(done.stdout)["choices"][0]["message"]["content"]
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(timeout=60)
    assert answer.strip() and status == 0


def test_files_that_the_readme_links_exist(readme, repo_root):
    links = re.findall(r"\]\((?!http)([^)#]+)\)|src=\"(?!http)([^\"]+)\"", readme)
    assert len(links) > 8
    for link in links:
        assert (repo_root / "".join(link)).exists(), link


def test_every_command_of_the_program_is_in_the_readme(readme):
    lines = [*commands(readme), *"".join(blocks(readme, "console")).splitlines()]
    used = {tuple(shlex.split(line, comments=True)[1:3]) for line in lines if line.startswith("medusa ")}
    names = {first for first, _ in used} | {f"{first} {second}" for first, second in used}
    assert {"distill", "train", "eval", "calibrate", "generate", "bench", "serve", "export", "import"} <= names
    assert {"inspect data", "inspect run", "inspect heads", "inspect tree"} <= names
