"""Hundreds of requests of all kinds that come, go and fail at random: each answer is the one that it gets alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import NoRepeatNGramLogitsProcessor

from known_drafter import KnownDrafter
from medusa.base_model import adapt_base_model
from medusa.drafter import RootDrafter
from medusa.infer.engine import Engine
from medusa.infer.generation import run_requests
from medusa.infer.request import Request
from medusa.infer.service import EngineService, Finished, Piece
from medusa.lookup import LookupDrafter
from medusa.sampling import GREEDY_SAMPLING, SamplingParams
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat

NUM_KINDS, NUM_REQUESTS = 40, 300
TOKENIZER = tiny_tokenizer()


class GivesUp:
    """A processor that raises at a certain length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores):
        if ids.shape[1] >= self.length:
            raise RuntimeError("gives up")
        return scores


def sampling_of(rng, kind, prompt):
    if kind % 4 == 0:
        return GREEDY_SAMPLING
    if kind % 7 == 0:
        return SamplingParams(0.8, seed=kind, processors=(GivesUp(len(prompt) + rng.randrange(6)),))
    processors = (NoRepeatNGramLogitsProcessor(3),) if kind % 3 == 0 else ()
    return SamplingParams(
        rng.choice([0.5, 1.0]),
        top_k=rng.choice([0, 5]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=kind,
        processors=processors,
    )


def make_kinds(rng):
    """Arguments of requests; many prompts begin alike, so that the prefix cache has something to find."""
    opening = [3 + n % 90 for n in range(70)]
    kinds = []
    for kind in range(NUM_KINDS):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 20, 60]))]
        prompt = opening[: rng.choice([0, 0, 40, 70])] + own
        kinds.append(
            {
                "prompt_ids": prompt,
                "max_new_tokens": rng.choice([1, 2, 9, 20]),
                "eos_token_ids": frozenset([rng.randrange(VOCAB_SIZE)]),
                "stop": [TOKENIZER.decode([rng.randrange(5, VOCAB_SIZE - 30)])] if kind % 5 == 0 else [],
                "sampling": sampling_of(rng, kind, prompt),
                "speculate": kind % 6 != 0,
                "num_logprobs": 1 if kind % 8 == 0 else None,
            }
        )
    return kinds


def make_request(arguments):
    return Request(tokenizer=TOKENIZER, **{**arguments, "prompt_ids": list(arguments["prompt_ids"])})


@pytest.fixture(scope="module")
def base():
    return adapt_base_model(tiny_model("llama"), TOKENIZER, name="tiny")


@pytest.fixture(scope="module")
def kinds():
    return make_kinds(random.Random(0))


@pytest.fixture(scope="module")
def alone(base, kinds):
    """Every kind by itself, nothing drafted; a failing one as far as it came."""
    requests = [make_request(kind) for kind in kinds]
    for request in requests:
        try:
            for _ in run_requests(base, RootDrafter(), [request]):
                pass
        except RuntimeError:
            assert request.error is not None
    return requests


def assert_as_alone(request, expected):
    if request.finish_reason == "abort":
        assert request.token_ids == expected.token_ids[: len(request.token_ids)]
        return
    assert request.token_ids == expected.token_ids and request.text == expected.text
    assert (request.finish_reason, request.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert type(request.error) is type(expected.error)


def drafters(kinds, alone):
    texts = [kind["prompt_ids"] + request.token_ids for kind, request in zip(kinds, alone, strict=True)]
    return {"known": KnownDrafter(texts, VOCAB_SIZE, depth=3), "lookup": LookupDrafter()}


def rows_of(drafter: Any) -> Any:
    return drafter.rows if isinstance(drafter, KnownDrafter) else drafter._rows


@pytest.mark.parametrize("name, max_rows", [("known", 5), ("lookup", 3)])
def test_every_answer_is_the_one_that_it_gets_alone(base, kinds, alone, name, max_rows):
    rng, drafter = random.Random(1), drafters(kinds, alone)[name]
    engine = Engine(base, drafter, max_rows=max_rows, capacity=160, prefill_chunk=24, prefix_cache_bytes=60_000)
    todo = [rng.randrange(NUM_KINDS) for _ in range(NUM_REQUESTS)]
    requests, alive, outcomes = [], [], []
    num_bytes = None
    while len(requests) < len(todo) or engine.has_work:
        for _ in range(min(rng.choice([0, 0, 1, 2, 6]), len(todo) - len(requests))):
            requests.append(make_request(kinds[todo[len(requests)]]))
            alive.append(requests[-1])
            engine.submit(requests[-1])
        if alive and rng.random() < 0.1:
            chosen = rng.choice(alive)
            if rng.random() < 0.5:
                chosen.cancel()
            else:
                chosen.deadline = 0.0
        ended = [request for request, _ in engine.step() if request.is_finished]
        alive = [request for request in alive if not request.is_finished]
        outcomes += ended
        used = len(engine.running) + len(engine.admissions)
        assert engine.state.num_rows == len(engine.running) and used <= max_rows
        assert int(engine.state.cache.lengths.count_nonzero()) <= used
        assert engine.prefix_cache.num_bytes <= engine.prefix_cache.max_bytes
        num_bytes = num_bytes or engine.state.cache.num_bytes()
    assert sorted(map(id, outcomes)) == sorted(map(id, requests)), "each ends once"
    for request, kind in zip(requests, todo, strict=True):
        assert_as_alone(request, alone[kind])
    ends = [request.finish_reason or "error" for request in requests]
    assert {"stop", "length", "abort", "error"} == set(ends) and ends.count("abort") < NUM_REQUESTS / 4
    assert sum(request.num_cached_tokens for request in requests) > 1000
    assert name != "known" or sum(sum(request.stats.accepted_by_position) for request in requests) > 300
    assert engine.state.num_rows == 0 and int(engine.state.cache.lengths.sum()) == 0
    assert not rows_of(drafter) and engine.state.cache.num_bytes() == num_bytes


def test_a_service_under_load_answers_the_same(base, kinds, alone):
    """From several threads' view: requests are handed in while the engine steps, some are cancelled at any time."""
    rng = random.Random(2)
    engine = Engine(base, drafters(kinds, alone)["known"], max_rows=4, capacity=160, prefix_cache_bytes=60_000)
    service = EngineService(engine, max_waiting=200)
    service.start()
    todo = [rng.randrange(NUM_KINDS) for _ in range(100)]
    requests, events = [make_request(kinds[kind]) for kind in todo], [[] for _ in todo]
    for request, received in zip(requests, events, strict=True):
        service.submit(request, received.append)
        if rng.random() < 0.15:
            service.cancel(rng.choice(requests))
    assert service.drain(120.0)
    for request, received, kind in zip(requests, events, todo, strict=True):
        assert_as_alone(request, alone[kind])
        *pieces, end = received
        assert all(isinstance(piece, Piece) for piece in pieces)
        assert [token for piece in pieces for token in piece.token_ids] == request.token_ids
        if request.error is None:
            assert "".join(piece.text for piece in pieces) == request.text
            assert end == Finished(request.finish_reason, request.stop_reason)
    load = service.load()
    assert (load.num_running, load.num_waiting, load.kv_tokens_used) == (0, 0, 0)
