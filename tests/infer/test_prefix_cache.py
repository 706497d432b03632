"""Keys and values of earlier requests: found by their tokens, exact, bounded."""

from __future__ import annotations

import pytest
import torch

from known_drafter import KnownDrafter
from medusa.base_model import adapt_base_model
from medusa.drafter import RootDrafter
from medusa.infer.engine import Engine
from medusa.infer.prefix_cache import BLOCK, PrefixCache
from medusa.infer.request import Request
from medusa.kv_cache import KVCache
from medusa.lookup import LookupDrafter
from medusa.sampling import GREEDY_SAMPLING, SamplingParams
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat
LAYERS, HEADS, SIZE = 2, 3, 4
BLOCK_BYTES = 2 * LAYERS * HEADS * BLOCK * SIZE * 4


def filled(token_ids, num_rows=1, row=0):
    """A cache whose row holds keys and values that only depend on tokens and places, and where they are."""
    cache = KVCache(LAYERS, num_rows, 400)
    rows, size = slice(row, row + 1), len(token_ids)
    cache.begin_forward(rows, size)
    tokens = torch.tensor(token_ids)[None, None, :, None] + torch.arange(size)[:, None] / 1000
    for layer in range(LAYERS):
        states = (tokens + 1000 * layer).expand(1, HEADS, size, SIZE).contiguous()
        cache.update(states, -states, layer)
    cache.commit(rows, torch.arange(size)[None], torch.tensor([size]))
    return cache


def held(cache, row):
    return cache.copy_out(row, 0, int(cache.lengths[row]))


def assert_same(cache, row, token_ids):
    expected = held(filled(token_ids), 0)
    found = held(cache, row)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


TEXT = [n * 7 % 101 for n in range(5 * BLOCK)]


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, 2 * BLOCK + 5, 4 * BLOCK])
def test_the_longest_known_beginning_is_filled_in(length):
    prefix_cache = PrefixCache(100 * BLOCK_BYTES)
    prefix_cache.store(filled(TEXT[:length]), 0, TEXT[:length])
    target = KVCache(LAYERS, 3, 400)
    num_found = prefix_cache.restore(target, 2, TEXT)
    assert num_found == length // BLOCK * BLOCK and target.lengths.tolist() == [0, 0, num_found]
    if num_found:
        assert_same(target, 2, TEXT[:num_found])
    assert prefix_cache.num_bytes == num_found // BLOCK * BLOCK_BYTES


def test_only_the_same_tokens_at_the_same_places_are_found():
    prefix_cache = PrefixCache(100 * BLOCK_BYTES)
    other = TEXT[: 2 * BLOCK] + [120] + TEXT[2 * BLOCK + 1 :]
    for text in (TEXT, other):
        prefix_cache.store(filled(text), 0, text)
    assert prefix_cache.num_bytes == 8 * BLOCK_BYTES, "the beginning that both have is kept once"
    for asked, num_known in ((other, 5), (TEXT, 5), (TEXT[BLOCK:], 0), (TEXT[1:], 0), (TEXT[: 2 * BLOCK - 1], 1)):
        target = KVCache(LAYERS, 1, 400)
        assert prefix_cache.restore(target, 0, asked) == num_known * BLOCK
        if num_known:
            assert_same(target, 0, asked[: num_known * BLOCK])
    assert PrefixCache(1 << 20).restore(KVCache(LAYERS, 1, 400), 0, TEXT) == 0


def test_memory_is_bounded_and_the_least_recently_used_go():
    prefix_cache = PrefixCache(6 * BLOCK_BYTES + BLOCK_BYTES // 2)
    texts = [[start, *TEXT[: 3 * BLOCK - 1]] for start in (1, 2, 3)]
    for text in texts[:2]:
        prefix_cache.store(filled(text), 0, text)
    prefix_cache.restore(KVCache(LAYERS, 1, 400), 0, texts[0])
    prefix_cache.store(filled(texts[2]), 0, texts[2])
    assert prefix_cache.num_bytes == 6 * BLOCK_BYTES
    found = [prefix_cache.restore(KVCache(LAYERS, 1, 400), 0, text) // BLOCK for text in texts]
    assert found == [3, 0, 3]
    prefix_cache.store(filled(TEXT[:BLOCK]), 0, TEXT[:BLOCK])
    found = [prefix_cache.restore(KVCache(LAYERS, 1, 400), 0, text) // BLOCK for text in texts]
    assert found == [2, 0, 3], "an end goes before its beginning"


def test_a_text_larger_than_the_memory_keeps_its_beginning():
    prefix_cache = PrefixCache(2 * BLOCK_BYTES)
    prefix_cache.store(filled(TEXT), 0, TEXT)
    assert prefix_cache.restore(KVCache(LAYERS, 1, 400), 0, TEXT) == 2 * BLOCK
    assert prefix_cache.num_bytes == 2 * BLOCK_BYTES


def test_what_is_kept_is_a_copy():
    prefix_cache, source = PrefixCache(100 * BLOCK_BYTES), filled(TEXT)
    prefix_cache.store(source, 0, TEXT)
    for block in source._blocks.values():
        block.zero_()
    target = KVCache(LAYERS, 1, 400)
    prefix_cache.restore(target, 0, TEXT)
    assert_same(target, 0, TEXT)


@pytest.fixture(scope="module")
def base():
    return adapt_base_model(tiny_model("gemma3"), tiny_tokenizer(), name="tiny")


def chat(base, prefix_cache_bytes, drafter, sampling=GREEDY_SAMPLING):
    """Three turns, each prompt the text so far and some more; two other rows beside it begin with the same system
    prompt. Returns the answers and how many tokens were not computed."""
    engine = Engine(base, drafter, max_rows=3, capacity=250, prefix_cache_bytes=prefix_cache_bytes, prefill_chunk=20)
    system = [3 + n % 50 for n in range(40)]
    history, answers, cached = list(system), [], []
    for turn in range(3):
        prompts = [[*history, 60, 61 + turn], [*system, 70 + turn], [*system, 80, 81, turn + 5]]
        requests = [Request(prompt, 21, frozenset(), tiny_tokenizer(), sampling=sampling) for prompt in prompts]
        for _ in engine.run(requests):
            pass
        answers.append([request.token_ids for request in requests])
        cached.append([request.num_cached_tokens for request in requests])
        history = requests[0].prompt_ids + requests[0].token_ids
    return answers, cached


@pytest.mark.parametrize("sampling", [GREEDY_SAMPLING, SamplingParams(0.9, repetition_penalty=1.1, seed=7)])
def test_turns_of_a_conversation_say_the_same_with_and_without(base, sampling):
    """Layers that slide over a window of 8 among them; heads' place taken by drafters that follow their rows."""
    expected, nothing = chat(base, 0, RootDrafter(), sampling)
    assert nothing == [[0] * 3] * 3
    for drafter in (RootDrafter(), LookupDrafter(), KnownDrafter([], VOCAB_SIZE)):
        answers, cached = chat(base, 1 << 20, drafter, sampling)
        assert answers == expected
        assert cached[0][0] == 0 and [row[1:] for row in cached[1:]] == [[BLOCK, BLOCK]] * 2
        assert [row[0] for row in cached[1:]] == [BLOCK, 2 * BLOCK], "answers are remembered too"


def test_the_last_token_of_a_prompt_is_always_computed(base):
    engine = Engine(base, RootDrafter(), max_rows=1, capacity=250, prefix_cache_bytes=1 << 20)
    answers = []
    for _ in range(2):
        request = Request(TEXT[:BLOCK] + TEXT[:BLOCK], 4, frozenset(), tiny_tokenizer())
        for _ in engine.run([request]):
            pass
        answers.append(request.token_ids)
    assert answers[0] == answers[1] and request.num_cached_tokens == BLOCK
    assert engine.admissions.num_prompt_tokens == 4 * BLOCK and engine.admissions.num_cached_tokens == BLOCK


def test_drafters_hear_of_what_was_not_computed(base):
    """Their rows hold the whole text, with no states for the part that was known."""
    prompt = TEXT[: 3 * BLOCK]
    first = Request(prompt, 40, frozenset(), tiny_tokenizer())
    engine = Engine(base, RootDrafter(), max_rows=1, capacity=250, prefix_cache_bytes=1 << 20)
    for _ in engine.run([first]):
        pass
    drafter = KnownDrafter([prompt + first.token_ids], VOCAB_SIZE, mistakes=0.0)
    engine = Engine(base, drafter, max_rows=1, capacity=250, prefix_cache_bytes=1 << 20)
    for accepted in (False, True):
        request = Request(prompt, 40, frozenset(), tiny_tokenizer())
        for _ in engine.run([request]):
            pass
        assert request.token_ids == first.token_ids and bool(request.num_cached_tokens) == accepted
        assert request.stats.mean_acceptance_length > 4
