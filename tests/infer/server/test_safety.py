"""Keys, limits, headers, logs: what a stranger can and cannot do."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import warnings
from unittest.mock import Mock

import pytest

from medusa.infer.server import run
from medusa.infer.server.auth import ApiKeys, load_keys
from medusa.infer.server.errors import ApiError
from medusa.infer.server.gate import Gate
from medusa.infer.server.limits import Limits
from medusa.infer.server.metrics import Metrics
from medusa.infer.server.request_log import LOGGER, _Lines, request_id
from serving import KEY, serving

OTHER = "another-key-also-long"
BODY = {"prompt": "hi", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(model):
    with serving(model, ApiKeys([KEY, OTHER])) as served:
        yield served


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_any_of_several_keys_lets_in(locked, key):
    with locked.http(headers={"Authorization": f"Bearer {key}"}) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
        assert http.get("/metrics").status_code == 200
    with locked.openai() as client:
        assert client.models.list().data[0].id == "tiny"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere", "/v1/chat/completions"]
)
def test_everything_else_is_refused(locked, header, path):
    with locked.http(headers={"Authorization": header} if header is not None else {}) as http:
        response = http.get(path)
    assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "AuthenticationError" and KEY not in response.text


def test_health_and_the_page_are_open(locked):
    with locked.http() as http:
        assert (http.get("/health").status_code, http.get("/health").content) == (200, b"")
        assert http.get("/").status_code == 200 and KEY not in http.get("/").text


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n  {KEY}  \n")
    path.chmod(0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys = load_keys(path, {"MEDUSA_API_KEYS": f"{OTHER}, "})
    for key in (KEY, OTHER):
        keys.check(f"Bearer {key}")
    with pytest.raises(ApiError):
        keys.check("Bearer # ours")
    assert keys and not load_keys(None, {}) and KEY not in repr(vars(keys))
    load_keys(None, {}).check(None)


def test_key_files_that_help_nobody(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# none\n")
    for given, problem in ((path, "holds no key"), (tmp_path / "missing", "cannot be read")):
        with pytest.raises(ValueError, match=problem):
            load_keys(given, {})
    with pytest.raises(ValueError, match="got one of 5 characters, expected at least 16"):
        load_keys(None, {"MEDUSA_API_KEYS": "short"})
    path.write_text(KEY)
    path.chmod(0o644)
    with pytest.warns(UserWarning, match="can be read by others"):
        load_keys(path, {})


def test_a_body_over_the_limit_is_refused_with_and_without_its_length(served):
    size = served.context.limits.max_body_bytes + 1
    headers = {"Content-Type": "application/json"}
    with served.http() as http:
        for content in (b"x" * size, (b"x" * 65536 for _ in range(size // 65536 + 1))):
            response = http.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413 and response.json()["error"]["type"] == "RequestTooLargeError"
        assert http.get("/health").status_code == 200


def test_a_body_that_does_not_come_is_given_up():
    """And waiting for a client to go away, once its body is there, is not."""
    sent = []

    async def slow(delay):
        async def receive():
            if not sent and delay == 0:
                return {"type": "http.request", "body": b"{}", "more_body": False}
            await asyncio.sleep(delay or 0.05)
            return {"type": "http.disconnect"}

        async def app(scope, receive, send):
            await receive()
            sent.append("body")
            sent.append((await receive())["type"])

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        limits = Limits(10, body_timeout_s=0.01)
        await Gate(app, keys=ApiKeys(), limits=limits, metrics=Metrics("tiny"))(scope, receive, send)

    asyncio.run(slow(10))
    assert sent[0]["status"] == 408 and "body" not in sent
    sent.clear()
    asyncio.run(slow(0))
    assert sent == ["body", "http.disconnect"]


def test_other_sites_may_not_call_unless_they_are_named(served, model):
    origin = {"Origin": "https://chat.example"}
    preflight = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with served.http() as http:
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers
        assert http.options("/v1/completions", headers=preflight).status_code == 405
    named = {"cors_origins": ["https://chat.example"]}
    with serving(model, ApiKeys([KEY]), app_options=named) as open_to, open_to.http() as http:
        assert http.options("/v1/completions", headers=preflight).headers["access-control-allow-origin"]
        other = http.options("/v1/completions", headers=preflight | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_security_headers_and_request_ids(http):
    response = http.get("/", headers={"X-Request-Id": "mine-1"})
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff" and response.headers["X-Request-Id"] == "mine-1"
    assert "server" not in response.headers
    for bad in ("a b", "x" * 65, 'quote"', "new\tline"):
        assert http.get("/health", headers={"X-Request-Id": bad}).headers["X-Request-Id"].startswith("req-")
    assert request_id(None) != request_id(None)


def test_logs_have_the_request_and_never_what_was_said(locked, caplog):
    logging.getLogger(LOGGER).propagate = True
    secret = "the-secret-of-my-prompt"
    with caplog.at_level(logging.INFO, LOGGER), locked.http(headers={"Authorization": f"Bearer {KEY}"}) as http:
        http.post("/v1/completions", json={"prompt": secret, "max_tokens": 1}, headers={"X-Request-Id": "r1"})
        http.post(f"/{secret}?key={KEY}", json={"prompt": secret})
    stream = io.StringIO()
    for form in ("json", "text"):
        for record in caplog.records:
            stream.write(_Lines(form).format(record) + "\n")
    lines = stream.getvalue()
    assert secret not in lines and KEY not in lines
    first = json.loads(lines.splitlines()[0])
    assert (first["request_id"], first["status"], first["route"]) == ("r1", 200, "/v1/completions")
    assert first["method"] == "POST" and first["seconds"] > 0 and first["client"] == "127.0.0.1"


def test_loopback_is_told_from_the_world():
    assert all(map(run._is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(run._is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.org")))


def test_an_open_server_is_warned_about(monkeypatch):
    class Reached(Exception):
        pass

    def stop(*arguments):
        raise Reached

    monkeypatch.setattr(run, "make_context", stop)
    with pytest.warns(UserWarning, match="listening on 0.0.0.0 without an API key"), pytest.raises(Reached):
        run.serve(lambda: None, run.ServeOptions(host="0.0.0.0"), ApiKeys())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for host, keys in (("0.0.0.0", ApiKeys([KEY])), ("127.0.0.1", ApiKeys())):
            with pytest.raises(Reached):
                run.serve(lambda: None, run.ServeOptions(host=host), keys)


def test_the_model_is_loaded_and_warmed_up_in_a_thread_that_ends(monkeypatch, model):
    """What is computed in the main thread leaves OpenMP's helpers there, which slows the engine's thread down."""
    threads, contexts = [], []

    def make_context(model, options):
        threads.append(threading.current_thread())
        contexts.append(make(model, options))
        return contexts[0]

    def load():
        threads.append(threading.current_thread())
        return model

    make, server = run.make_context, Mock(started=True)
    monkeypatch.setattr(run, "make_context", make_context)
    monkeypatch.setattr(run, "make_server", lambda *arguments: server)
    assert run.serve(load, run.ServeOptions(max_rows=1), ApiKeys()) == 0
    contexts[0].service.drain(0)
    assert len(threads) == 2 and len(set(threads)) == 1
    server.run.assert_called_once()
    assert threads[0] is not threading.current_thread() and not threads[0].is_alive()
