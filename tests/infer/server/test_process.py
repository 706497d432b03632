"""`medusa serve` as a process of its own: it starts from a heads directory, says what is wrong, ends when told to."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from medusa.base_model import load_base_model
from medusa.checkpoint import BaseReference, HeadsInfo, save_heads
from medusa.cli import run
from medusa.config import HeadsConfig
from medusa.fingerprint import fingerprint
from medusa.heads import MedusaHeads
from medusa.infer.server.request_log import LOGGER
from serving import KEY
from tiny_models import save_tiny_base


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def save_random_heads(folder, base_dir):
    base = load_base_model(str(base_dir))
    heads = MedusaHeads(HeadsConfig(num_heads=3, num_layers=1, hidden_size=32, vocab_size=128))
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    save_heads(folder, heads, HeadsInfo(BaseReference(str(base_dir), fingerprint(base.model))))
    return folder


@pytest.fixture(scope="module")
def heads_dir(tiny_base_dir, tmp_path_factory):
    return save_random_heads(tmp_path_factory.mktemp("served") / "heads", tiny_base_dir)


@pytest.fixture(autouse=True)
def _own_logging():
    """The command sets up logging for a process of its own; here it is one test's."""
    loggers = [logging.getLogger(name) for name in (LOGGER, "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def process(heads_dir, tmp_path):
    """start(*options) -> (process, client); killed at the end whatever happens. Its log is tmp_path / "server.log":
    a pipe that nobody reads is full after some 400 requests, and the server waits."""
    started = []

    def start(*options, environment=None):
        port = free_port()
        command = [sys.executable, "-m", "medusa", "serve", "--heads", str(heads_dir), "--port", str(port), *options]
        with (tmp_path / "server.log").open("w") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | (environment or {}))
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        started.append((child, client))
        end = time.monotonic() + 60
        while True:
            try:
                if client.get("/health").status_code == 200:
                    return child, client
            except httpx.TransportError:
                assert child.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < end, "the server did not start"
                time.sleep(0.05)

    yield start
    for child, client in started:
        client.close()
        child.kill()
        child.wait()


def wait_until_running(client):
    while not re.search(r"num_requests_running\{.*\} [1-9]", client.get("/metrics").text):
        time.sleep(0.01)


def test_term_under_load_finishes_what_runs_and_exits_with_zero(process, tmp_path):
    child, client = process(
        "--log-format", "json", "--max-rows", "2", "--drain-timeout", "20", environment={"MEDUSA_API_KEYS": KEY}
    )
    client.headers["Authorization"] = f"Bearer {KEY}"
    assert client.get("/metrics").status_code == 200
    answers = []

    def ask():
        body = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        answers.append(client.post("/v1/completions", json=body))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until_running(client)
    child.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    child.wait(timeout=60)
    errors = (tmp_path / "server.log").read_text()
    assert child.returncode == 0, errors
    assert {answer.status_code for answer in answers} <= {200, 503} and len(answers) == 6
    finished = [answer.json() for answer in answers if answer.status_code == 200]
    assert len(finished) >= 2 and all(body["usage"]["completion_tokens"] == 200 for body in finished)
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines]
    assert messages[0] == "serving" and messages.index("draining") < messages.index("drained")
    assert KEY not in errors and "hello" not in errors


def soak(repo_root, child, client, heads_dir, num_requests):
    """The load script's: mixed lengths, clients that leave, malformed bodies, answers compared with offline ones."""
    command = [sys.executable, str(repo_root / "scripts" / "load_test.py"), "soak", "--url", str(client.base_url)]
    command += ["--heads", str(heads_dir), "--requests", str(num_requests), "--pid", str(child.pid)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.timeout(3600)
def test_soak(process, heads_dir, repo_root):
    """MEDUSA_SOAK_REQUESTS=2000 for a real one."""
    num_requests = int(os.environ.get("MEDUSA_SOAK_REQUESTS", "100"))
    child, client = process("--max-rows", "16")
    done = soak(repo_root, child, client, heads_dir, num_requests)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "400" in done.stdout and " 0 clients left" not in done.stdout
    metrics = client.get("/metrics").text
    assert float(re.search(r"spec_decode_num_accepted_tokens_total\{.*\} (\S+)", metrics)[1]) > 0


def test_the_soak_sees_a_wrong_answer(process, tmp_path, repo_root):
    """The server has one base and the script another."""
    served, other = (
        save_random_heads(tmp_path / f"heads-{seed}", save_tiny_base(tmp_path / f"base-{seed}", seed=seed))
        for seed in (0, 1)
    )
    child, client = process("--heads", str(served))
    done = soak(repo_root, child, client, other, 10)
    assert done.returncode == 1 and "expected [" in done.stdout, done.stdout + done.stderr


def test_a_second_signal_does_not_wait(process):
    child, client = process("--drain-timeout", "600", "--max-rows", "1")
    body = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "n": 64}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
    thread.start()
    wait_until_running(client)
    child.send_signal(signal.SIGTERM)
    while client.get("/health").status_code == 200:
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    thread.join(30)
    child.wait(timeout=30)
    assert answers[0].status_code == 503 and child.returncode == 0


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--max-model-len", "100000"], "--max-model-len: got 100000, expected 2 to 256"),
        (["--api-key-file", "missing"], "--api-key-file: missing cannot be read"),
        (["--port", "0"], "port"),
        (["--tool-parser", "other"], "tool-parser"),
    ],
)
def test_what_cannot_be_served_is_one_line(heads_dir, capsys, options, problem):
    assert run(["serve", "--heads", str(heads_dir), *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert problem in error


def test_without_the_extra_one_line_says_what_to_install(heads_dir, capsys, monkeypatch):
    import medusa.cli_serve

    monkeypatch.setattr(medusa.cli_serve, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert run(["serve", "--heads", str(heads_dir)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "got no uvicorn" in error and "pip install 'medusa-decoding[serve]'" in error
