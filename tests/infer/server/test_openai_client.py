"""The protocol as the real `openai` client uses it: every field, and streaming = not streaming = `generate`."""

from __future__ import annotations

import math

import openai
import pytest
import torch

from medusa.infer import generate
from medusa.sampling import SamplingParams
from serving import CONTEXT, EOS

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo"}]


def reference(model, prompt, **options):
    """What `generate` answers; greedy unless told otherwise."""
    [result] = generate(model, [prompt], **({"max_new_tokens": 40} | options))
    return result


def chat(client, **options):
    return client.chat.completions.create(**({"model": "tiny", "messages": CHAT, "max_tokens": 40} | options))


def complete(client, **options):
    return client.completions.create(**({"model": "tiny", "prompt": "abc", "max_tokens": 40} | options))


def joined_chat(chunks):
    """(text, finish reason) by index of a chat's chunks."""
    texts, ends = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    return texts, ends


def test_models(client):
    [card] = client.models.list().data
    assert (card.id, card.object, card.max_model_len) == ("tiny", "model", CONTEXT)
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat_is_generate_and_streams_the_same(client, model):
    expected = reference(model, CHAT)
    answer = chat(client, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert (choice.finish_reason, choice.stop_reason) == (expected.finish_reason, None)
    num_prompt = len(model.base.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"])
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, len(expected.token_ids))
    assert usage.total_tokens == num_prompt + len(expected.token_ids)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    chunks = list(chat(client, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert joined_chat(chunks) == ({0: expected.text}, {0: expected.finish_reason})
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_is_generate_and_streams_the_same(client, model):
    expected = reference(model, "abc", raw=True)
    answer = complete(client, temperature=0)
    assert answer.choices[0].text == expected.text and answer.object == "text_completion"
    assert answer.usage.completion_tokens == len(expected.token_ids)
    chunks = list(complete(client, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


def test_default_length_of_a_completion_is_sixteen(client):
    answer = client.completions.create(model="tiny", prompt="abc", temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_several_choices(client, model, stream):
    """Choice p * n + i; prompts as texts or as ids."""
    texts = ["abc", "xyz"]
    ids = [model.base.tokenizer(text).input_ids for text in texts]
    expected = [reference(model, text, raw=True).text for text in texts for _ in range(2)]
    for prompt in (texts, ids):
        answer = complete(client, prompt=prompt, n=2, temperature=0, stream=stream)
        given = {}
        for part in answer if stream else [answer]:
            for choice in part.choices:
                given[choice.index] = given.get(choice.index, "") + choice.text
        assert [given[index] for index in range(4)] == expected
    assert complete(client, prompt=ids[0], temperature=0).choices[0].text == expected[0]


def test_usage_counts_a_prompt_once(client):
    chunks = list(
        complete(client, prompt=["abc", "wxyz"], n=2, max_tokens=3, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == 7
    assert all(chunk.usage is None for chunk in chunks[:-1])
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == counts[-2] > 0


@pytest.mark.parametrize(
    "sent, params",
    [
        ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8}),
        ({"extra_body": {"top_k": 5, "min_p": 0.05}}, {"top_k": 5, "min_p": 0.05}),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
        (
            {"temperature": 0, "extra_body": {"repetition_penalty": 1.4}},
            {"temperature": 0.0, "repetition_penalty": 1.4},
        ),
    ],
)
def test_sampling_fields_and_seed(client, model, sent, params):
    """The same seed gives the tokens that `generate` draws; choice i has seed + i."""
    expected = [
        reference(model, CHAT, sampling=SamplingParams(**{"temperature": 1.0, "seed": seed} | params)).text
        for seed in (7, 8)
    ]
    answer = chat(client, seed=7, n=2, **sent)
    assert [choice.message.content for choice in answer.choices] == expected
    texts, _ = joined_chat(chat(client, seed=7, n=2, stream=True, **sent))
    assert [texts[0], texts[1]] == expected


def test_logit_bias(client, model):
    first = model.base.tokenizer("q").input_ids[0]
    answer = complete(client, max_tokens=5, temperature=0, logit_bias={str(first): 100})
    assert answer.choices[0].text == "qqqqq"
    free = reference(model, "abc", raw=True)
    banned = complete(client, temperature=0, logit_bias={str(free.token_ids[0]): -100}, extra_body=WITH_IDS)
    assert banned.choices[0].token_ids[0] != free.token_ids[0]


WITH_IDS = {"return_token_ids": True}


def test_stop_strings_and_ids(client, model):
    free = reference(model, "abc", raw=True)
    readable = [
        n
        for n in range(4, len(free.text) - 2)
        if free.text[n : n + 2].isprintable() and "\ufffd" not in free.text[n : n + 2]
    ]
    stop = free.text[readable[0] : readable[0] + 2]
    expected = reference(model, "abc", raw=True, stop=[stop])
    for stops in (stop, ["never there", stop]):
        answer = complete(client, temperature=0, stop=stops)
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (expected.text, "stop", stop)
        assert answer.usage.completion_tokens == len(expected.token_ids)
        chunks = list(complete(client, temperature=0, stop=stops, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
        assert chunks[-1].choices[0].stop_reason == stop
    token = free.token_ids[5]
    answer = complete(client, temperature=0, extra_body={"stop_token_ids": [token]} | WITH_IDS)
    choice = answer.choices[0]
    assert choice.stop_reason == token and choice.token_ids == free.token_ids[: free.token_ids.index(token) + 1]


def test_an_ending_token_stops_and_can_be_ignored(client, model):
    bias = {str(EOS): 100}
    choice = complete(client, max_tokens=8, temperature=0, logit_bias=bias).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", None)
    answer = complete(client, max_tokens=8, temperature=0, logit_bias=bias, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 8)


@torch.inference_mode()
def base_logprobs(model, ids):
    """float32 [T, V]: of the token after each."""
    return model.base.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_chat_logprobs_are_the_base_models_own(client, model):
    """Also under temperature, penalties and speculation, and for every token of a multi-token step."""
    options = {"seed": 3, "temperature": 0.5, "presence_penalty": 1.0, "logprobs": True, "top_logprobs": 3}
    answer = chat(client, **options, extra_body=WITH_IDS)
    content, ids = answer.choices[0].logprobs.content, answer.choices[0].token_ids
    scores = base_logprobs(model, answer.prompt_token_ids + ids)[len(answer.prompt_token_ids) - 1 :]
    assert len(content) == len(ids) == answer.usage.completion_tokens
    for entry, token, row in zip(content, ids, scores, strict=False):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
    whole = b"".join(bytes(entry.bytes) for entry in content)
    for special in (b"<pad>", b"<|im_start|>", b"<|im_end|>"):
        whole = whole.replace(special, b"")
    assert answer.choices[0].message.content == whole.decode(errors="replace")
    streamed = [
        entry
        for chunk in chat(client, stream=True, **options)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_completion_logprobs_and_echo(client, model):
    answer = complete(client, temperature=0, echo=True, logprobs=2, max_tokens=12, extra_body=WITH_IDS)
    choice, plain = answer.choices[0], complete(client, temperature=0, max_tokens=12).choices[0]
    assert choice.text == "abc" + plain.text
    ids = choice.prompt_token_ids + choice.token_ids
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == len(ids)
    rows = base_logprobs(model, ids)
    expected = [float(rows[place, token]) for place, token in enumerate(ids[1:])]
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert all(
        len(top) in (2, 3) and token in top
        for top, token in zip(logprobs.top_logprobs[1:], logprobs.tokens[1:], strict=True)
    )
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]
    chunks = list(complete(client, temperature=0, echo=True, logprobs=2, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert sum((part.tokens for part in parts), []) == logprobs.tokens
    assert sum((part.text_offset for part in parts), []) == logprobs.text_offset


def test_a_prompt_can_be_scored_alone(client, model):
    ids = model.base.tokenizer("abcdef").input_ids
    answer = complete(client, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == ("abcdef", "length", 0)
    assert len(choice.logprobs.tokens) == 6 and math.isfinite(sum(choice.logprobs.token_logprobs[1:]))


def test_max_completion_tokens_come_first_and_chat_may_fill_the_context(client):
    assert (
        chat(client, max_tokens=30, max_completion_tokens=3, extra_body={"ignore_eos": True}).usage.completion_tokens
        == 3
    )
    answer = client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == CONTEXT and answer.choices[0].finish_reason == "length"


def test_content_parts_roles_and_template_arguments(http):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    plain = [{"role": "user", "content": "ab"}]

    def tokens(messages, **extra):
        return http.post("/tokenize", json={"messages": messages, **extra}).json()["tokens"]

    assert tokens(parts) == tokens(plain)
    assert tokens([{"role": "developer", "content": "x"}]) == tokens([{"role": "system", "content": "x"}])
    loud = http.post("/detokenize", json={"tokens": tokens(plain, chat_template_kwargs={"shout": True})}).json()
    assert loud["prompt"].endswith("LOUD ")


def test_speculation_off_is_the_same_answer_and_statistics_say_so(client, model):
    on = chat(client, temperature=0, extra_body={"medusa": {"statistics": True}}, max_tokens=200)
    off = chat(client, temperature=0, extra_body={"medusa": {"statistics": True, "speculate": False}}, max_tokens=200)
    assert on.choices[0].message.content == off.choices[0].message.content
    fast, slow = on.metrics["speculative_decoding"], off.metrics["speculative_decoding"]
    assert (
        slow["num_draft_tokens"] == 0 and slow["mean_acceptance_length"] == 1 and slow["draft_acceptance_rate"] is None
    )
    steps, tokens = fast["num_spec_steps"], on.usage.completion_tokens
    assert fast["num_draft_tokens"] > 0 and sum(fast["acceptance_histogram"]) == steps
    assert fast["mean_acceptance_length"] == pytest.approx((tokens - 1) / steps)
    kept = sum(count * steps for count, steps in enumerate(fast["acceptance_histogram"]))
    assert fast["num_accepted_draft_tokens"] == kept > 0
    assert on.metrics["timing"]["time_to_first_token_s"] > 0
    chunks = list(chat(client, temperature=0, stream=True, max_tokens=200, extra_body={"medusa": {"statistics": True}}))
    assert chunks[-1].choices == [] and chunks[-1].metrics["speculative_decoding"] == fast
    several = chat(client, n=2, extra_body={"medusa": {"statistics": True}})
    assert getattr(several, "metrics", None) is None


@pytest.mark.parametrize("stop", [[], ["1", "22"]])
def test_marks_are_the_text(client, stop):
    """Joined they are the answer; drafted text is as many bytes as drafted tokens where tokens are bytes."""
    options = {"temperature": 0, "max_tokens": 200, "stop": stop, "extra_body": {"medusa": {"marks": True}}}
    choice = chat(client, **options).choices[0]
    marks = choice.medusa["marks"]
    assert "".join(mark["text"] for mark in marks) == choice.message.content
    drafted = sum(len(mark["text"]) for mark in marks if mark["drafted"])
    assert drafted <= choice.medusa["num_drafted_accepted"] <= choice.medusa["num_tokens"]
    assert stop or drafted > 0
    for chunk in chat(client, stream=True, **options):
        for part in chunk.choices:
            if medusa := getattr(part, "medusa", None):
                assert "".join(mark["text"] for mark in medusa["marks"]) == part.delta.content


def test_prefix_of_a_conversation_is_not_computed_again(client):
    messages = [{"role": "user", "content": "tell me about the number 4711 " * 4}]
    first = chat(client, messages=messages, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "more"},
    ]
    again = chat(client, messages=messages, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens >= 64


def test_unknown_model_is_the_clients_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-x")
    assert caught.value.param == "model" and "does not exist" in caught.value.message
