"""The engine as a server uses it: log-probabilities, ends, cancelling, failures that stay alone, prompts in chunks."""

from __future__ import annotations

import time

import pytest
import torch

from known_drafter import KnownDrafter
from medusa.base_model import adapt_base_model
from medusa.drafter import RootDrafter
from medusa.infer.engine import Engine
from medusa.infer.generation import run_requests
from medusa.infer.request import Request
from medusa.sampling import SamplingParams
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16], [7, 17, 18, 19], [20]]
LENGTH = 24


@pytest.fixture(scope="module")
def base():
    return adapt_base_model(tiny_model("llama"), tiny_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


def make_request(prompt, length=LENGTH, **options):
    return Request(list(prompt), length, frozenset(), tiny_tokenizer(), **options)


def answer_alone(base, request):
    """What it says by itself, nothing drafted, its prompt computed at once."""
    for _ in run_requests(base, RootDrafter(), [request], max_rows=1):
        pass
    return request.token_ids


@pytest.fixture(scope="module")
def answers(base):
    return [answer_alone(base, make_request(prompt)) for prompt in PROMPTS]


def known_drafter(answers, prompts=PROMPTS, **options):
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return KnownDrafter(texts, VOCAB_SIZE, **options)


def make_engine(base, drafter, **options):
    return Engine(base, drafter, **({"max_rows": 3, "capacity": 200} | options))


def run(engine, requests):
    """All of them to their ends; returns each one's pieces."""
    pieces = {id(request): [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for request, piece in engine.step():
            pieces[id(request)].append(piece)
    return [pieces[id(request)] for request in requests]


def assert_empty(engine):
    assert not engine.running and not engine.waiting and not len(engine.admissions)
    assert engine.state.num_rows == 0 and int(engine.state.cache.lengths.sum()) == 0


def reference_logprobs(stock, prompt, answer):
    """[T - 1, V]: of every token of prompt and answer but the first."""
    with torch.no_grad():
        return stock(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, :-1].log_softmax(-1)


def assert_logprobs(found, expected, token_ids, num_top):
    """expected: [n, V], where each token was chosen."""
    assert [entry.token_id for entry in found] == token_ids
    for entry, row in zip(found, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert len(entry.top) == num_top
        values = row.topk(max(num_top, 1)).values.tolist()[:num_top]
        assert [value for _, value in entry.top] == pytest.approx(values, abs=1e-4)
        assert all(float(row[token]) == pytest.approx(value, abs=1e-4) for token, value in entry.top)


def test_logprobs_are_the_bases_own_whatever_is_drafted(base, stock):
    """Greedy, sampled and penalised rows; the numbers are those before all of that. One row does not ask."""
    params = [
        {"num_logprobs": 3},
        {"num_logprobs": 0, "sampling": SamplingParams(0.8, top_k=4, seed=3)},
        {},
        {"num_logprobs": 2, "sampling": SamplingParams(1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=4)},
    ]
    make = [lambda i=i, p=p: make_request(PROMPTS[i], **p) for i, p in enumerate(params)]
    answers = [answer_alone(base, request()) for request in make]
    requests = [request() for request in make]
    pieces = run(make_engine(base, known_drafter(answers, PROMPTS[:4])), requests)
    assert [request.token_ids for request in requests] == answers
    for request, got, asked in zip(requests, pieces, params, strict=True):
        assert sum(request.stats.accepted_by_position) > 0
        if not asked:
            assert all(piece.logprobs is None for piece in got)
            continue
        assert all(len(piece.logprobs) == len(piece.token_ids) for piece in got)
        found = [entry for piece in got for entry in piece.logprobs]
        expected = reference_logprobs(stock, request.prompt_ids, request.token_ids)[len(request.prompt_ids) - 1 :]
        assert_logprobs(found, expected, request.token_ids, asked["num_logprobs"])


def test_prompts_are_scored_in_chunks(base, stock, answers):
    prompt = PROMPTS[1] + answers[1]
    request = make_request(prompt, 3, prompt_logprobs=True, num_logprobs=2)
    engine = make_engine(base, RootDrafter(), prefill_chunk=5, prefix_cache_bytes=1 << 20)
    run(engine, [make_request(prompt, 1)])
    run(engine, [request])
    assert request.num_cached_tokens == 0, "what is not computed cannot be scored"
    assert request.prompt_token_logprobs[0] is None and len(request.prompt_token_logprobs) == len(prompt)
    expected = reference_logprobs(stock, prompt, [])
    assert_logprobs(request.prompt_token_logprobs[1:], expected, prompt[1:], 2)
    single = make_request([9], 1, prompt_logprobs=True)
    run(engine, [single])
    assert single.prompt_token_logprobs == [None]


def test_nothing_is_scored_unless_somebody_asks(base, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("log-probabilities were computed")

    for module in ("decode", "engine", "admission"):
        monkeypatch.setattr(f"medusa.infer.{module}.token_logprobs", refuse)
    run(make_engine(base, RootDrafter()), [make_request(prompt, 3) for prompt in PROMPTS])
    with pytest.raises(AssertionError):
        run(make_engine(base, RootDrafter()), [make_request([5], 3, num_logprobs=0)])


def test_what_ended_an_answer_is_said(base, answers):
    answer = answers[0]
    place = next(n for n in range(3, LENGTH) if answer[n] not in answer[:n])
    text = tiny_tokenizer().decode(answer[2:4])
    cases = [
        ({"stop_token_ids": frozenset([answer[place]])}, "stop", answer[place]),
        ({"stop_token_ids": frozenset([127])}, "length", None),
        ({"stop": [text]}, "stop", text),
        ({}, "length", None),
    ]
    for options, finish_reason, stop_reason in cases:
        request = make_request(PROMPTS[0], num_logprobs=1, **options)
        [pieces] = run(make_engine(base, known_drafter(answers)), [request])
        assert (request.finish_reason, request.stop_reason) == (finish_reason, stop_reason)
        assert request.token_ids == answer[: len(request.token_ids)] == [t for p in pieces for t in p.token_ids]
        assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
        if stop_reason == answer[place]:
            assert len(request.token_ids) == place + 1, "the token that stops is the last one"
    request = Request(PROMPTS[0], LENGTH, frozenset([answer[place]]), tiny_tokenizer())
    run(make_engine(base, RootDrafter()), [request])
    assert (request.finish_reason, request.stop_reason) == ("stop", None), "the model's own end"


def test_who_is_cancelled_leaves_at_the_next_step_wherever_it_is(base, answers):
    """One that decodes, one whose prompt is being computed, one that waits; the others do not notice."""
    prompts = [PROMPTS[0], PROMPTS[1], [9] * 60, PROMPTS[3]]
    requests = [make_request(prompt) for prompt in prompts]
    engine = make_engine(base, known_drafter(answers, depth=1), prefill_chunk=8)
    for request in requests:
        engine.submit(request)
    while not requests[1].token_ids:
        engine.step()
    assert requests[2] in engine.admissions.requests and requests[3] in engine.waiting
    for request in (requests[1], requests[2], requests[3]):
        request.cancel()
        request.cancel()
    before = [list(request.token_ids) for request in requests]
    gained = engine.step()
    assert engine.running == [requests[0]] and not len(engine.admissions) and not engine.waiting
    assert engine.state.num_rows == 1 and int(engine.state.cache.lengths.count_nonzero()) == 1
    ended = [request for request, piece in gained if request.finish_reason == "abort" and not piece.token_ids]
    assert {id(request) for request in ended} == {id(request) for request in requests[1:]}
    while engine.has_work:
        engine.step()
    assert requests[0].token_ids == answers[0] and requests[0].finish_reason == "length"
    assert [request.token_ids for request in requests[1:]] == before[1:]
    assert_empty(engine)


def test_an_overdue_request_is_aborted(base, answers):
    late, early = make_request(PROMPTS[0], deadline=time.monotonic() + 3600), make_request(PROMPTS[1], deadline=0.0)
    engine = make_engine(base, RootDrafter())
    engine.submit(late)
    engine.submit(early)
    engine.step()
    assert early.finish_reason == "abort" and not early.token_ids and late.token_ids
    late.deadline = 0.0
    engine.step()
    assert late.finish_reason == "abort" and late.token_ids == answers[0][: len(late.token_ids)]
    assert_empty(engine)


def test_an_abort_gives_out_the_text_that_a_stop_string_held_back(base, answers):
    text = tiny_tokenizer().decode(answers[0])
    request = make_request(PROMPTS[0], stop=[text[:2] + "\x00"])
    engine = make_engine(base, RootDrafter(), max_rows=1)
    engine.submit(request)
    pieces = [piece for _ in range(2) for _, piece in engine.step()]
    request.cancel()
    pieces += [piece for _, piece in engine.step()]
    assert request.text == text[: len(request.token_ids)] == "".join(piece.text for piece in pieces)


class Faulty:
    """A processor that goes wrong at its request's n-th token."""

    def __init__(self, prompt, after, how):
        self.place, self.how = len(prompt) + after, how

    def __call__(self, ids, scores):
        if ids.shape[1] < self.place:
            return scores
        if self.how == "raises":
            raise RuntimeError("a grammar gave up")
        if self.how == "in place":
            scores.fill_(float("nan"))
            return scores
        return scores[:, :-1] if self.how == "shape" else torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", ["raises", "excludes", "in place", "shape"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_request_that_fails_fails_alone(base, how, after, temperature):
    """Sampled neighbours draw the numbers that they would draw without it."""
    samplings = [SamplingParams(1.0, seed=1), SamplingParams(0.7, top_p=0.9, seed=2), SamplingParams(temperature=0.0)]
    make = [lambda i=i, s=s: make_request(PROMPTS[i], sampling=s) for i, s in enumerate(samplings)]
    expected = [answer_alone(base, request()) for request in make]
    sampling = SamplingParams(temperature, seed=5, processors=(Faulty(PROMPTS[3], after, how),))
    faulty = make_request(PROMPTS[3], sampling=sampling)
    others = [request() for request in make]
    engine = make_engine(base, known_drafter([*expected, expected[0]], PROMPTS[:4]), max_rows=4)
    pieces = run(engine, [others[0], faulty, *others[1:]])
    assert [request.token_ids for request in others] == expected and not any(request.error for request in others)
    assert faulty.is_finished and faulty.finish_reason is None
    assert len(faulty.token_ids) == after == sum(len(piece.token_ids) for piece in pieces[1])
    message = {"raises": "a grammar gave up", "shape": r"got scores of shape \(1, 127\)"}.get(
        how, "no token is possible"
    )
    with pytest.raises((RuntimeError, ValueError), match=message):
        raise faulty.error
    assert_empty(engine)


def test_what_goes_wrong_beyond_the_end_is_no_failure(base, answers):
    """A grammar may refuse to be asked again once it is satisfied; drafts reach beyond the end all the same."""
    ids, answer = PROMPTS[0], answers[0]
    place = next(n for n in range(3, LENGTH) if answer[n] not in answer[:n])
    sampling = SamplingParams(0.0, processors=(Faulty(ids, place + 1, "raises"),))
    for options in ({"stop_token_ids": frozenset([answer[place]])}, {"length": place + 1}):
        request = make_request(ids, **options, sampling=sampling)
        run(make_engine(base, known_drafter(answers, depth=8, mistakes=0.0)), [request])
        assert request.error is None and request.token_ids == answer[: place + 1]
        assert request.stats.num_steps == 1, "the draft must reach beyond the end, or this shows nothing"


def test_offline_a_failure_is_raised(base):
    request = make_request([5], sampling=SamplingParams(processors=(Faulty([5], 2, "raises"),)))
    with pytest.raises(RuntimeError, match="a grammar gave up"):
        answer_alone(base, request)


def test_tokens_that_cannot_be_made_text_are_one_requests_failure(base, answers):
    class Broken:
        def decode(self, ids, **options):
            raise KeyError("no such token")

    broken = Request(PROMPTS[1], LENGTH, frozenset(), Broken())
    whole = make_request(PROMPTS[0])
    run(make_engine(base, RootDrafter()), [broken, whole])
    assert isinstance(broken.error, KeyError) and whole.token_ids == answers[0]


def test_speculation_is_left_off_for_who_asks(base, answers):
    requests = [make_request(prompt, speculate=n % 2 == 0) for n, prompt in enumerate(PROMPTS)]
    drafter = known_drafter(answers)
    run(make_engine(base, drafter), requests)
    assert [request.token_ids for request in requests] == answers and not drafter.muted
    for request in requests:
        assert (request.stats.num_drafted > 0) == (sum(request.stats.accepted_by_position) > 0) == request.speculate
    drafter.propose = None  # it would not even be asked
    run(make_engine(base, drafter), [make_request(PROMPTS[0], 5, speculate=False)])


def test_the_other_rows_hear_of_a_muted_one_only_through_the_hook(base, answers):
    drafter = known_drafter(answers)
    engine = make_engine(base, drafter)
    for n, prompt in enumerate(PROMPTS[:3]):
        engine.submit(make_request(prompt, speculate=n != 1))
    engine.step()
    row = next(n for n, request in enumerate(engine.running) if not request.speculate)
    assert drafter.muted == {row}


LONG = [3 + n % 120 for n in range(150)]


@pytest.mark.parametrize("chunk", [7, 40, 1000])
def test_prompts_in_chunks_give_the_same_answers(base, answers, chunk):
    """Long and short ones together, more than there are rows, so that prompts get in each other's way."""
    prompts = [LONG, *PROMPTS, LONG[10:], PROMPTS[2] * 9]
    expected = [answer_alone(base, make_request(prompt)) for prompt in prompts]
    drafter = known_drafter(expected, prompts)
    requests = [make_request(prompt) for prompt in prompts]
    engine = make_engine(base, drafter, max_rows=4, prefill_chunk=chunk)
    run(engine, requests)
    assert [request.token_ids for request in requests] == expected
    assert all(sum(request.stats.accepted_by_position) > 0 for request in requests), "rows were followed"
    assert_empty(engine)
    assert not drafter.rows


class PrefillLog:
    """How many tokens of which prompt each forward of a prompt computed."""

    def __init__(self, monkeypatch):
        from medusa.infer import admission

        self.sizes, prefill = [], admission.prefill

        def logged(base_model, state, row, token_ids):
            self.sizes.append(len(token_ids))
            return prefill(base_model, state, row, token_ids)

        monkeypatch.setattr(admission, "prefill", logged)


def test_nobody_waits_for_more_than_a_chunk_and_a_step(base, monkeypatch):
    """While a long prompt is computed, who decodes gains a token in every step."""
    log = PrefillLog(monkeypatch)
    engine = make_engine(base, RootDrafter(), prefill_chunk=40)
    running = make_request(PROMPTS[0], 30)
    engine.submit(running)
    engine.step()
    engine.submit(make_request(LONG, 2))
    del log.sizes[:]
    for _ in range(4):
        before = len(running.token_ids)
        engine.step()
        assert len(running.token_ids) == before + 1
    assert log.sizes == [40, 40, 40, 30]


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one(base, monkeypatch):
    log = PrefillLog(monkeypatch)
    engine = make_engine(base, RootDrafter(), prefill_chunk=40)
    engine.submit(make_request(LONG, 2))
    engine.step()
    short = make_request(PROMPTS[1], 2)
    engine.submit(short)
    del log.sizes[:]
    engine.step()
    assert short.token_ids and log.sizes == [7], "it goes first"


def test_a_long_prompt_gets_every_second_chunk_however_many_short_ones_come(base):
    engine = make_engine(base, RootDrafter(), max_rows=4, prefill_chunk=40)
    long = make_request(LONG, 2)
    engine.submit(long)
    num_steps = 0
    while not long.token_ids:
        engine.submit(make_request(LONG[:40], 1))
        engine.step()
        num_steps += 1
    assert 4 < num_steps <= 8


def test_the_memory_is_one_row_more_than_may_run(base):
    for max_rows, num_rows in ((1, 1), (2, 3), (8, 9)):
        assert make_engine(base, RootDrafter(), max_rows=max_rows).state.cache.num_rows == num_rows


def test_queue_prefill_and_decoding_add_up(base):
    requests = [make_request(prompt, 6) for prompt in PROMPTS[:2]]
    engine = make_engine(base, RootDrafter(), max_rows=1)
    run(engine, requests)
    for request in requests:
        stats = request.stats
        assert 0 <= stats.queue_s <= stats.time_to_first_token_s <= stats.seconds
        assert stats.queue_s + stats.prefill_s + stats.decode_s == pytest.approx(stats.seconds)
    assert requests[1].stats.queue_s > requests[0].stats.queue_s
