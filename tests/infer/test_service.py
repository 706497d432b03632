"""The engine in a thread of its own: what sinks get, refusals, cancelling, draining, and failures of others' code."""

from __future__ import annotations

import threading
import time

import pytest

from medusa.base_model import adapt_base_model
from medusa.drafter import RootDrafter
from medusa.infer.engine import Engine
from medusa.infer.generation import run_requests
from medusa.infer.request import Piece, Request
from medusa.infer.service import Draining, EngineLoad, EngineService, Failed, Finished, QueueFull
from medusa.sampling import SamplingParams
from tiny_models import tiny_model, tiny_tokenizer

LONG_WAIT = 60.0  # seconds until a test fails that hangs


@pytest.fixture(scope="module")
def base():
    return adapt_base_model(tiny_model("llama"), tiny_tokenizer(), name="tiny")


def make_request(prompt, length=8, **options):
    return Request(list(prompt), length, frozenset(), tiny_tokenizer(), **options)


class Sink:
    """What one request got."""

    def __init__(self):
        self.events, self.ended, self.begun = [], threading.Event(), threading.Event()

    def __call__(self, event):
        assert not self.ended.is_set(), "nothing comes after the end"
        self.events.append(event)
        self.begun.set()
        if not isinstance(event, Piece):
            self.ended.set()

    def wait(self):
        assert self.ended.wait(LONG_WAIT)
        return self.events[-1]


class Gate(RootDrafter):
    """Steps only while it is open; says that somebody stands before it."""

    def __init__(self):
        self.open, self.reached = threading.Event(), threading.Event()

    def propose(self, root, hidden):
        self.reached.set()
        assert self.open.wait(LONG_WAIT)
        return super().propose(root, hidden)


@pytest.fixture
def make_service(base):
    """Services whose threads end with the test."""
    services = []

    def make(drafter=None, *, start=True, max_waiting=128, listener=None, **options):
        engine = Engine(base, drafter or RootDrafter(), **({"max_rows": 2, "capacity": 100} | options))
        service = EngineService(engine, max_waiting=max_waiting, listener=listener)
        services.append(service)
        if start:
            service.start()
        return service

    yield make
    for service in services:
        if isinstance(service.engine.state.drafter, Gate):
            service.engine.state.drafter.open.set()
        service.drain(0.0)
        assert not service._thread.is_alive()


def submit(service, request):
    sink = Sink()
    service.submit(request, sink)
    return sink


def test_a_sink_gets_the_answer_in_pieces_and_then_its_end(base, make_service):
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    expected = [make_request(prompt) for prompt in prompts]
    for _ in run_requests(base, RootDrafter(), expected):
        pass
    service = make_service()
    sinks = [submit(service, make_request(prompt, num_logprobs=1)) for prompt in prompts]
    for sink, request in zip(sinks, expected, strict=True):
        assert sink.wait() == Finished("length", None)
        pieces = sink.events[:-1]
        assert [token for piece in pieces for token in piece.token_ids] == request.token_ids
        assert "".join(piece.text for piece in pieces) == request.text
        assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert service.drain(LONG_WAIT) and service.alive
    assert service.load() == EngineLoad(kv_tokens_capacity=200, num_prompt_tokens_total=10)


def test_the_end_says_why(make_service):
    def refuse(ids, scores):
        raise RuntimeError("no grammar allows this")

    service = make_service()
    stopped = submit(service, make_request([5, 6], stop_token_ids=frozenset(range(128))))
    failed = submit(service, make_request([5, 6], sampling=SamplingParams(processors=(refuse,))))
    overdue = submit(service, make_request([5, 6], deadline=time.monotonic() - 1))
    assert stopped.wait() == Finished("stop", stopped.events[0].token_ids[0])
    assert isinstance(failed.wait(), Failed) and str(failed.events[0].error) == "no grammar allows this"
    assert overdue.wait() == Finished("abort", None) and service.alive


def test_what_does_not_fit_is_refused_at_once(make_service):
    with pytest.raises(ValueError, match="the engine's cache holds 100 a row"):
        make_service().submit(make_request([5] * 99, 2), Sink())
    with pytest.raises(ValueError, match="max_waiting is -1"):
        make_service(start=False, max_waiting=-1)


def test_the_queue_is_bounded(make_service):
    gate = Gate()
    service = make_service(gate, max_waiting=2)
    sinks = [submit(service, make_request([5, 6])) for _ in range(4)]
    with pytest.raises(QueueFull, match="2 requests wait already") as caught:
        submit(service, make_request([5, 6]))
    assert caught.value.retry_after_s >= 1.0
    service._last_end -= 10_000.0  # as if nobody had asked for hours
    gate.open.set()
    assert [sink.wait() for sink in sinks] == [Finished("length", None)] * 4
    assert submit(service, make_request([5, 6])).wait(), "there is room again"
    assert service._mean_gap_s < 100.0


def test_the_load_counts_who_runs_and_who_waits(make_service):
    gate = Gate()
    service = make_service(gate, prefix_cache_bytes=1 << 20)
    sinks = [submit(service, make_request([5, 6, 7])) for _ in range(5)]
    assert gate.reached.wait(LONG_WAIT) and service.load().num_waiting >= 3
    gate.open.set()
    [sink.wait() for sink in sinks]
    assert service.drain(LONG_WAIT)
    load = service.load()
    assert (load.num_running, load.num_waiting, load.kv_tokens_used) == (0, 0, 0)
    assert (load.num_prompt_tokens_total, load.prefix_cache_capacity_bytes) == (15, 1 << 20)


def test_a_cancelled_request_is_gone_after_the_step_that_runs(make_service):
    gate = Gate()
    service = make_service(gate)
    requests = [make_request([5, 6], 60), make_request([7, 8]), make_request([9, 10])]
    sinks = [submit(service, request) for request in requests]
    assert gate.reached.wait(LONG_WAIT)
    for request in (requests[0], requests[2]):
        service.cancel(request)
        service.cancel(request)
    gate.open.set()
    assert [sink.wait() for sink in sinks] == [
        Finished("abort", None),
        Finished("length", None),
        Finished("abort", None),
    ]
    assert len(requests[0].token_ids) <= 3 and not requests[2].token_ids
    service.cancel(requests[0])
    assert submit(service, make_request([5, 6])).wait() == Finished("length", None)


def test_draining_finishes_what_was_taken_and_takes_no_more(make_service):
    gate = Gate()
    service = make_service(gate)
    sinks = [submit(service, make_request([5, 6])) for _ in range(5)]
    drained = []
    thread = threading.Thread(target=lambda: drained.append(service.drain(LONG_WAIT)))
    thread.start()
    while not service._is_draining:
        time.sleep(0.001)
    with pytest.raises(Draining):
        submit(service, make_request([5, 6]))
    gate.open.set()
    thread.join(LONG_WAIT)
    assert drained == [True] and [sink.events[-1] for sink in sinks] == [Finished("length", None)] * 5


def test_what_is_not_finished_in_time_is_told_so(make_service):
    gate = Gate()
    service = make_service(gate)
    sinks = [submit(service, make_request([5, 6], 90)) for _ in range(3)]
    assert gate.reached.wait(LONG_WAIT)
    threading.Timer(0.05, gate.open.set).start()
    assert not service.drain(0.0)
    assert [sink.events[-1] for sink in sinks] == [Finished("abort", None)] * 3 and service.load().num_running == 0


def test_an_engine_that_dies_tells_everyone(make_service, caplog):
    class Dying(Gate):
        def propose(self, root, hidden):
            super().propose(root, hidden)
            raise MemoryError("no memory left")

    gate = Dying()
    service = make_service(gate)
    sinks = [submit(service, make_request([5, 6])) for _ in range(4)]
    assert service.alive
    gate.open.set()
    for sink in sinks:
        assert "the engine died: MemoryError: no memory left" in str(sink.wait().error)
    assert not service.alive and "the engine's thread died" in caplog.text
    with pytest.raises(Draining):
        submit(service, make_request([5, 6]))
    assert not service.drain(LONG_WAIT)


def test_a_receiver_that_fails_costs_only_its_own_request(make_service, caplog):
    def closed(event):
        raise RuntimeError("Event loop is closed")

    service = make_service()
    service.submit(make_request([5, 6], 90), closed)
    assert submit(service, make_request([7, 8])).wait() == Finished("length", None)
    assert service.drain(LONG_WAIT) and "a request's receiver failed" in caplog.text


class Listener:
    def __init__(self, fails=False):
        self.steps, self.first, self.finished, self.fails = [], [], [], fails

    def on_step(self, num_tokens, seconds, load):
        self.steps.append((num_tokens, seconds, load))
        if self.fails:
            raise ZeroDivisionError("a metric failed")

    def on_first_token(self, request):
        self.first.append(request)

    def on_finished(self, request):
        self.finished.append(request)
        assert request.is_finished


def test_a_listener_hears_of_every_step_and_request(make_service):
    listener = Listener()
    service = make_service(listener=listener)
    requests = [make_request([5, n]) for n in range(3, 8)]
    [sink.wait() for sink in [submit(service, request) for request in requests]]
    assert service.drain(LONG_WAIT)
    assert sum(num_tokens for num_tokens, _, _ in listener.steps) == 40
    assert all(seconds > 0 for _, seconds, _ in listener.steps)
    assert max(load.num_running for _, _, load in listener.steps) <= 2 and listener.steps[-1][2].num_running == 0
    assert {id(r) for r in listener.first} == {id(r) for r in listener.finished} == {id(r) for r in requests}


def test_statistics_that_fail_do_not_stop_the_answers(make_service, caplog):
    service = make_service(listener=Listener(fails=True))
    assert submit(service, make_request([5, 6])).wait() == Finished("length", None)
    assert service.drain(LONG_WAIT) and "the step listener failed" in caplog.text


def test_an_idle_service_sleeps(base):
    """Nothing looks for work while there is none."""

    class Counting(Engine):
        num_looks = 0

        @property
        def has_work(self):
            self.num_looks += 1
            return super().has_work

    engine = Counting(base, RootDrafter(), max_rows=2, capacity=100)
    service = EngineService(engine)
    service.start()
    assert submit(service, make_request([5, 6])).wait()
    time.sleep(0.02)  # the step that ended it may still be on its way
    looks = engine.num_looks
    time.sleep(0.05)
    assert engine.num_looks <= looks + 2
    assert service.drain(LONG_WAIT)
