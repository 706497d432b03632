"""Requests that leave early, come too many, take too long or fail; and how a server ends."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest

from medusa.infer import generate
from medusa.infer.server.metrics import PREFIX
from serving import serving

LONG = {"prompt": "abc", "max_tokens": 500, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "abc", "max_tokens": 2, "temperature": 0}


class Held:
    """The engine's thread stops before each step until it is let go on."""

    def __init__(self, served):
        self.go = threading.Event()
        engine = served.context.service.engine
        self._step = engine.step
        engine.step = lambda: self.go.wait(30) and self._step()
        self._engine = engine

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.go.set()
        self._engine.step = self._step


async def post(served, body, *, after=None, path="/v1/completions", timeout=60):
    """The response; with `after` the client goes away after so many seconds (None comes back)."""
    async with httpx.AsyncClient(base_url=served.url, timeout=timeout) as http:
        try:
            return await asyncio.wait_for(http.post(path, json=body), after)
        except asyncio.TimeoutError:
            return None


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(served, stream):
    assert asyncio.run(post(served, LONG | {"n": 4, "stream": stream}, after=0.1)) is None
    load = served.wait_idle()
    assert load.kv_tokens_used == 0
    metrics = served.http().get("/metrics").text
    assert f'{PREFIX}request_success_total{{finished_reason="abort"' in metrics


def test_a_stream_closed_half_way_frees_its_row(served):
    with served.http().stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        next(response.iter_lines())
    assert served.wait_idle().kv_tokens_used == 0


def test_answers_are_the_same_whoever_comes_and_goes(served, model):
    """Clients leave at every moment; whoever stays gets what `generate` gives."""
    prompts = [f"number {n}" for n in range(24)]
    expected = [result.text for result in generate(model, prompts, raw=True, max_new_tokens=30)]

    async def all_of_them():
        jobs = [
            post(served, {"prompt": prompt, "max_tokens": 30, "temperature": 0}, after=0.02 * n if n % 3 == 0 else None)
            for n, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*jobs)

    answers = asyncio.run(all_of_them())
    assert sum(answer is not None for answer in answers) >= 16
    for n, answer in enumerate(answers):
        if answer is not None:
            assert answer.json()["choices"][0]["text"] == expected[n]
    assert served.wait_idle().kv_tokens_used == 0


def test_a_full_queue_says_when_to_come_again(model):
    with serving(model, max_rows=1, max_waiting=1) as served, Held(served) as held, served.http() as http:
        threads = [
            threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": SHORT}) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(served.context.service._sinks) == 2)
        for body in (SHORT, SHORT | {"n": 3}, SHORT | {"stream": True}):
            response = http.post("/v1/completions", json=body)
            assert response.status_code == 429 and int(response.headers["Retry-After"]) >= 1
            assert response.json()["error"]["type"] == "RateLimitError"
        held.go.set()
        for thread in threads:
            thread.join(30)
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_choices_that_find_no_place_leave_nothing_behind(model):
    """Three choices where two fit: none is decoded."""
    with serving(model, max_rows=1, max_waiting=1) as served, served.http() as http:
        assert http.post("/v1/completions", json=LONG | {"n": 3}).status_code == 429
        assert served.wait_idle().kv_tokens_used == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_past_its_time_is_given_up_and_told(served, stream):
    body = LONG | {"stream": stream, "medusa": {"timeout_s": 0.03}}
    response = served.http().post("/v1/completions", json=body)
    assert "time limit" in response.text
    if stream:
        assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 504 and response.json()["error"]["type"] == "TimeoutError"
    served.wait_idle()


def test_the_servers_limit_holds_where_clients_ask_for_more(model):
    with serving(model, request_timeout_s=0.03) as served, served.http() as http:
        assert http.post("/v1/completions", json=LONG | {"medusa": {"timeout_s": 60}}).status_code == 504


def test_one_request_that_fails_does_not_touch_the_others(served, monkeypatch):
    from medusa.infer.server import processors

    good = served.http().post("/v1/completions", json=SHORT | {"max_tokens": 40}).json()["choices"][0]["text"]
    monkeypatch.setattr(processors.LogitBias, "__call__", lambda self, ids, scores: 1 / 0)

    async def both():
        jobs = [post(served, SHORT | {"max_tokens": 40}), post(served, SHORT | {"logit_bias": {"5": 1}})]
        return await asyncio.gather(*jobs)

    fine, failed = asyncio.run(both())
    assert fine.json()["choices"][0]["text"] == good
    assert failed.status_code == 500 and "division" not in failed.text


def test_a_dead_engine_is_said_and_ends_the_server(model):
    with serving(model) as served, served.http() as http:
        served.context.service.engine.step = lambda: 1 / 0
        assert http.post("/v1/completions", json=SHORT).status_code == 500
        wait_until(lambda: not served.context.service.alive)
        wait_until(lambda: served.server.should_exit)


def test_draining_finishes_what_runs_and_refuses_what_comes(model):
    with serving(model) as served:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(served.http().post("/v1/completions", json=LONG)))
        with Held(served):
            thread.start()
            wait_until(lambda: served.context.service._sinks)
            served.server.stop()
            wait_until(lambda: served.context.is_draining)
            with served.http() as http:
                wait_until(lambda: http.get("/health").status_code == 503)
                response = http.post("/v1/completions", json=SHORT)
                assert response.status_code == 503 and "shutting down" in response.json()["error"]["message"]
        thread.join(30)
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 500


def test_what_does_not_finish_in_the_drain_time_is_told(model):
    with serving(model, drain_timeout_s=0.05) as served:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(served.http().post("/v1/completions", json=LONG | {"n": 8}))
        )
        thread.start()
        wait_until(lambda: served.context.service.load().num_running)
        served.server.stop()
        thread.join(30)
        assert answers[0].status_code == 503 and "shutting down" in answers[0].json()["error"]["message"]


def test_metrics_count_what_happened(model):
    with serving(model) as served, served.http() as http:
        body = {"prompt": "abc", "max_tokens": 100, "temperature": 0, "n": 2, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body | {"medusa": {"statistics": True}, "n": 1}).json()
        http.post("/v1/completions", json=body)
        http.get("/not/a/route")
        served.wait_idle()
        values = {}
        for line in http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
    decoding = answer["metrics"]["speculative_decoding"]
    label = '{model_name="tiny"}'

    def value(name):
        return values[PREFIX + name + label]

    assert value("generation_tokens_total") == 300 and value("prompt_tokens_total") == 9
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("spec_decode_num_drafts_total") == 3 * decoding["num_spec_steps"]
    assert value("spec_decode_num_accepted_tokens_total") == 3 * decoding["num_accepted_draft_tokens"] > 0
    assert value("spec_decode_num_draft_tokens_total") >= 3 * decoding["num_accepted_draft_tokens"]
    at_first = 'spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"}'
    assert values[PREFIX + at_first] == 3 * sum(decoding["acceptance_histogram"][1:])
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert value(f"{name}_count") == 3
    assert value("inter_token_latency_seconds_count") > 3 and value("iteration_tokens_total_sum") == 300
    assert values[f'{PREFIX}request_success_total{{finished_reason="length",model_name="tiny"}}'] == 3
    other = 'http_requests_total{method="GET",model_name="tiny",route="other",status="404"}'
    assert values[PREFIX + other] == 1
