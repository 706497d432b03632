"""Where an answer ends, what is refused beforehand, and that nothing is left behind on the base model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from medusa.base_model import adapt_base_model
from medusa.config import HeadsConfig
from medusa.draft import Draft
from medusa.drafter import Drafter, RootDrafter
from medusa.heads import MedusaHeads
from medusa.infer import generate, stream
from medusa.infer.engine import Engine
from medusa.infer.generation import encode_prompt, stream_request
from medusa.infer.request import Request
from medusa.model import MedusaModel
from medusa.tree import DraftTree
from tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat


@pytest.fixture(scope="module")
def model():
    base = adapt_base_model(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    heads = MedusaHeads(HeadsConfig(num_heads=3, num_layers=1, hidden_size=32, vocab_size=128))
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    return MedusaModel(base, heads, DraftTree.cartesian([3, 2, 1]))


def with_eos(model, *ids):
    """The same model, its generation config naming these ending tokens."""
    base = dataclasses.replace(model.base)
    base.__dict__["eos_token_ids"] = frozenset(ids)
    return dataclasses.replace(model, base=base)


def answer_of(model, prompt="Hi", **options):
    return generate(model, [prompt], **({"max_new_tokens": 40, "ignore_eos": True} | options))[0]


class OracleDrafter(Drafter):
    """Drafts what is known to come, so that a step brings several tokens at once."""

    def __init__(self, answer, depth):
        self.tree, self.answer, self.max_nodes = DraftTree.chain(depth), answer, depth + 1

    def propose(self, root, hidden):
        place = self.answer.index(int(root[0]))
        row = (self.answer[place:] + [0] * self.tree.num_nodes)[: self.tree.num_nodes]
        return Draft.of_tree(self.tree, torch.tensor([row]))


def distinct_start(tokens):
    """Length of the longest beginning without a repeated token."""
    return next((n for n in range(1, len(tokens)) if tokens[n] in tokens[:n]), len(tokens))


@pytest.fixture(scope="module")
def known(model):
    """(prompt ids, answer) whose first ten tokens or more are all different."""
    for start in range(5, 100):
        ids = [start, start + 1]
        [result] = generate(model, [ids], max_new_tokens=40, ignore_eos=True)
        if distinct_start(result.token_ids) >= 10:
            return ids, result.token_ids
    raise AssertionError("no such prompt")


def run_known(model, known, *, eos=(), stop=(), max_new_tokens=10, depth=6):
    """Decode with an oracle, so that the end falls inside a step."""
    ids, answer = known
    request = Request(ids, max_new_tokens, frozenset(eos), model.base.tokenizer, list(stop))
    oracle = OracleDrafter(answer[: distinct_start(answer)], depth)
    engine = Engine(model.base, oracle, max_rows=1, capacity=64)
    pieces = [piece for _, piece in engine.run([request])]
    return request, pieces


def test_tokens_after_an_ending_token_are_dropped(model, known):
    _, answer = known
    request, pieces = run_known(model, known, eos=[127, answer[4]])
    assert request.token_ids == answer[:5] and request.finish_reason == "stop"
    assert len(pieces) == 2 and pieces[1].token_ids == answer[1:5] and pieces[1].num_drafted_accepted == 4
    for place in (2, 7):  # any of several ids
        assert run_known(model, known, eos=[answer[2], answer[7]][place == 7 :])[0].token_ids == answer[: place + 1]


def test_the_limit_is_counted_in_tokens_not_in_steps(model, known):
    for limit in range(1, 10):
        request, _ = run_known(model, known, max_new_tokens=limit)
        assert request.token_ids == known[1][:limit] and request.finish_reason == "length"
        assert request.stats.num_tokens == limit


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(model, known):
    tokenizer, answer = model.base.tokenizer, known[1]
    text = tokenizer.decode(answer[:10])
    stop = tokenizer.decode(answer[3:6])
    request, pieces = run_known(model, known, stop=[stop])
    assert request.text == text[: text.index(stop)] == "".join(piece.text for piece in pieces)
    assert request.finish_reason == "stop" and len(request.token_ids) <= 6


def test_statistics_add_up(model, known):
    request, pieces = run_known(model, known, depth=3)
    stats = request.stats
    assert [len(piece.token_ids) for piece in pieces] == [1, 4, 4, 1]
    assert stats.num_steps == 3 and stats.num_tokens == 10 and stats.mean_acceptance_length == 3.0
    assert stats.accepted_by_position == [3, 2, 2] or stats.accepted_by_position == [2, 2, 2]
    assert stats.num_drafted == 9 and 0 < stats.time_to_first_token_s <= stats.seconds


def test_ending_tokens_of_the_model_count_unless_ignored(model):
    whole = answer_of(model).token_ids
    ended = answer_of(with_eos(model, whole[7]), ignore_eos=False)
    assert ended.token_ids == whole[: whole.index(whole[7]) + 1] and ended.finish_reason == "stop"
    assert answer_of(with_eos(model, whole[7])).token_ids == whole


def test_pieces_joined_are_the_answer(model):
    whole = answer_of(model)
    pieces = list(stream(model, "Hi", max_new_tokens=40, ignore_eos=True))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    shown = []
    generate(model, ["Hi", "Ho"], max_new_tokens=5, on_piece=lambda index, piece: shown.append((index, piece.text)))
    assert {index for index, _ in shown} == {0, 1}


def test_exported_names_are_functions_whatever_was_imported_before():
    """A submodule of the same name would take the function's place once it is imported."""
    import importlib
    import pkgutil

    import medusa.infer

    submodules = {module.name for module in pkgutil.iter_modules(medusa.infer.__path__)}
    assert not submodules & set(medusa.infer.__all__)
    for name in submodules - {"draw_tree"}:
        importlib.import_module(f"medusa.infer.{name}")
    assert callable(medusa.infer.generate) and callable(medusa.infer.stream)


def test_prompts_are_text_messages_or_ids(model):
    tokenizer = model.base.tokenizer
    chat = encode_prompt(tokenizer, "Hi")
    assert tokenizer.decode(chat) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}]) == chat == encode_prompt(tokenizer, chat)
    assert tokenizer.decode(encode_prompt(tokenizer, "Hi", raw=True)) == "Hi"
    with pytest.raises(ValueError, match="no chat template; pass raw=True"):
        encode_prompt(tiny_tokenizer(chat_template=None), "Hi")


TOO_LONG = "10 prompt tokens and 250 new ones make 260, more than the 256.*lower max_new_tokens to 246"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"stop": [""]}, "an empty string would stop every answer"),
        ({"max_new_tokens": 250, "raw": True, "prompt": "a" * 10}, TOO_LONG),
        ({"prompt": "", "raw": True}, "got no tokens at all"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_is_computed(model, monkeypatch, options, message):
    def computed(*args, **kwargs):
        raise AssertionError("something was computed")

    monkeypatch.setattr(type(model.base), "forward", computed)
    prompt = options.pop("prompt", "Hi")
    for run in (lambda: generate(model, [prompt], **options), lambda: stream_request(model, prompt, **options)):
        with pytest.raises(ValueError, match=message):
            run()


def test_an_engine_refuses_what_its_cache_cannot_hold(model):
    engine = Engine(model.base, RootDrafter(), max_rows=1, capacity=12)
    with pytest.raises(ValueError, match="5 prompt tokens and 8 new ones need 13, the engine's cache holds 12 a row"):
        engine.submit(Request([5] * 5, 8, frozenset(), model.base.tokenizer))
    assert not engine.has_work


def test_the_longest_possible_answer_fits(model):
    """Prompt and answer fill the context to the last position; drafts beyond it are dropped, not an error."""
    prompt = [5] * 200
    [result] = generate(model, [prompt], max_new_tokens=56, ignore_eos=True)
    assert len(result.token_ids) == 56 and result.finish_reason == "length"


def test_rows_join_and_leave_and_come_back_in_order(model):
    prompts = [f"Prompt {n}" for n in range(7)]
    limits = [3, 20, 1, 8, 15, 2, 9]
    alone = [answer_of(model, prompt, max_new_tokens=n).token_ids for prompt, n in zip(prompts, limits, strict=True)]
    tokenizer = model.base.tokenizer
    requests = [
        Request(encode_prompt(tokenizer, prompt), n, frozenset(), tokenizer)
        for prompt, n in zip(prompts, limits, strict=True)
    ]
    engine = Engine(model.base, model.drafter(), max_rows=3, capacity=100)
    most = 0
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.running))
        assert len(engine.running) == engine.state.num_rows
    assert [request.token_ids for request in requests] == alone and most == 3


def test_nothing_is_left_on_the_base_model(model):
    """Not a mask, not a cache, not an autograd graph: a plain forward before and after is the same."""
    ids = torch.tensor([[5, 6, 7, 8]])
    names = {name for module in model.base.model.modules() for name in vars(module)}
    before = model.base.model(input_ids=ids).logits
    answer_of(model)
    after = model.base.model(input_ids=ids).logits
    assert torch.equal(before, after)
    assert {name for module in model.base.model.modules() for name in vars(module)} == names
    state = Engine(model.base, model.drafter(), max_rows=1, capacity=32).state
    assert state.hidden.grad_fn is None


def test_two_engines_in_turns_do_not_disturb_each_other(model):
    alone = [answer_of(model, prompt).token_ids for prompt in ("One", "Two")]
    streams = [stream(model, prompt, max_new_tokens=40, ignore_eos=True) for prompt in ("One", "Two")]
    tokens = [[], []]
    for pieces in zip(*streams, strict=False):
        for answer, piece in zip(tokens, pieces, strict=True):
            answer += piece.token_ids
    shorter = min(map(len, tokens))
    assert shorter > 20
    for answer, expected in zip(tokens, alone, strict=True):
        assert answer == expected[: len(answer)]
