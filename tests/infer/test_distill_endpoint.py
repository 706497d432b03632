"""Data from an OpenAI-compatible server: a local one that answers, fails, stalls and forgets as it is told."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from medusa.cli import run
from medusa.infer.distill_endpoint import Endpoint, distill_endpoint
from medusa.train.dataset import build_dataset
from tiny_models import tiny_tokenizer

pytest.importorskip("openai")
QUIET = Console(quiet=True)


class Server(ThreadingHTTPServer):
    """`fail(prompt, attempt)` -> an HTTP status instead of an answer, or None. `asked`: tries by prompt."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models, self.fail, self.asked, self.key = ["tiny"], lambda prompt, attempt: None, Counter(), None
        self.bodies = []
        self.busy = self.busiest = 0
        self.lock = threading.Lock()
        self.together = threading.Barrier(1)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def reply(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After-Ms", "1")  # tests need not wait as long as a person would
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.server.key = self.headers["Authorization"]
        self.reply(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.server.models]})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        with server.lock:
            server.bodies.append(body)
            server.asked[prompt] += 1
            attempt = server.asked[prompt]
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
        server.together.wait(timeout=30)
        with server.lock:
            server.busy -= 1
        if status := server.fail(prompt, attempt):
            return self.reply(status, {"error": {"message": f"no luck with {prompt}", "type": "x"}})
        message = {"role": "assistant", "content": prompt.upper()}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": len(prompt), "total_tokens": 3 + len(prompt)}
        content = {"id": "1", "object": "chat.completion", "created": 0, "model": "tiny", "choices": [choice]}
        return self.reply(200, content | {"usage": usage})


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{n}", "category": "c", "turns": [f"say {n}"]} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path):
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}


def ask(server, prompts, out, **settings):
    endpoint = Endpoint(server.url, **({"max_retries": 2} | settings))
    return distill_endpoint(endpoint, out, prompts, 64, QUIET)


def test_answers_become_records_that_train(server, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    out = tmp_path / "new" / "out.jsonl"
    result = ask(server, prompts, out)
    records = read(out)
    assert set(records) == {f"p{n}" for n in range(12)} and not result.failures
    messages = [{"role": "user", "content": "say 3"}, {"role": "assistant", "content": "SAY 3"}]
    expected = {"id": "p3", "category": "c", "messages": messages, "num_tokens": 5, "finish_reason": "stop"}
    assert records["p3"] == expected
    assert (result.num_records, result.num_answer_tokens, result.num_resumed) == (12, 62, 0)
    assert server.key == "Bearer secret" and "secret" not in out.read_text()
    for body in server.bodies:
        assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 64, "tiny")
    data = build_dataset(str(out), tiny_tokenizer(), 256)
    assert len(data) == 12 and all(example.loss_mask.any() for example in data.examples)


def test_many_are_asked_at_once_and_no_more_than_allowed(server, prompts, tmp_path):
    server.together = threading.Barrier(4)
    ask(server, prompts, tmp_path / "out.jsonl", concurrency=4)
    assert server.busiest == 4


def test_a_server_that_stumbles_is_asked_again(server, prompts, tmp_path):
    server.fail = lambda prompt, attempt: {1: 503, 2: 429}.get(attempt)
    assert not ask(server, prompts, tmp_path / "out.jsonl").failures
    assert set(server.asked.values()) == {3} and len(read(tmp_path / "out.jsonl")) == 12


def test_failures_are_named_and_only_they_are_asked_again(server, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    server.fail = lambda prompt, attempt: {"say 3": 500, "say 7": 400}.get(prompt)
    result = ask(server, prompts, out)
    assert set(result.failures) == {"p3", "p7"} and "no luck with say 7" in result.failures["p7"]
    assert set(read(out)) == {f"p{n}" for n in range(12)} - {"p3", "p7"}
    assert {record["id"] for record in read(tmp_path / "out.jsonl.failed").values()} == {"p3", "p7"}
    assert server.asked["say 3"] == 3 and server.asked["say 7"] == 1  # a 400 says the same every time
    with out.open("a") as file:
        file.write('{"id": "p3", "mess')  # and then the machine went down
    server.fail = lambda prompt, attempt: None
    server.asked.clear()
    result = ask(server, prompts, out)
    assert set(server.asked) == {"say 3", "say 7"} and (result.num_records, result.num_resumed) == (12, 10)
    assert len(read(out)) == 12 and not (tmp_path / "out.jsonl.failed").exists()


def test_the_command_says_what_failed(server, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    arguments = [
        "distill",
        "--endpoint",
        server.url,
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        "--max-retries",
        "0",
    ]
    server.fail = lambda prompt, attempt: 500 if prompt == "say 3" else None
    assert run(arguments) == 1
    assert f"1 prompts have no answer, see {out}.failed" in capsys.readouterr().err
    server.fail = lambda prompt, attempt: None
    assert run(arguments) == 0
    assert "12 conversations, 62 answer tokens (11 conversations were there before)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "models, arguments, problem",
    [
        (["a", "b"], [], "got no --model, expected one of a, b"),
        (["a"], ["--model", "c"], "got --model 'c', expected one of a"),
        (["a"], ["--base", "x"], "--endpoint answers --prompts FILE; leave out --base"),
    ],
)
def test_what_cannot_be_asked_is_one_line(server, prompts, tmp_path, capsys, models, arguments, problem):
    server.models = models
    common = ["distill", "--endpoint", server.url, "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")]
    assert run([*common, *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert not server.asked


def test_nobody_there(prompts, tmp_path, capsys):
    common = ["distill", "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"), "--max-retries", "0"]
    assert run([*common, "--endpoint", "http://127.0.0.1:9/v1"]) == 2
    assert "got no list of models" in capsys.readouterr().err
    assert run(common) == 2
    assert "expected --base (a directory or a Hub name) or --endpoint URL" in capsys.readouterr().err
