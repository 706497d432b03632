"""JSON by grammar, under speculation, and tool calls: forced, chosen, streamed."""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch

from medusa.infer.server.grammar import GrammarCompiler
from medusa.infer.server.text_codec import TextCodec
from medusa.infer.server.tools import FORMATS, HERMES, LLAMA3, MISTRAL, ToolReader, detect_format
from serving import EOS, VOCAB_SIZE, byte_tokenizer, serving, with_template

CHAT = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["id", "kind", "tags"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}}},
]


def chat(client, **options):
    return client.chat.completions.create(**({"model": "tiny", "messages": CHAT, "max_tokens": 120} | options))


def as_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_follow_the_schema_with_and_without_speculation(client, temperature):
    options = {"response_format": as_format(SCHEMA), "temperature": temperature, "seed": 1, "max_tokens": 400}
    answers = [chat(client, **options, extra_body={"medusa": {"speculate": on}}).choices[0] for on in (True, False)]
    assert answers[0].message.content == answers[1].message.content
    assert answers[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answers[0].message.content), SCHEMA)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, **options, stream=True))
    assert streamed == answers[0].message.content


def test_json_object_and_plain_completions(client):
    closing = {str(byte_tokenizer().convert_tokens_to_ids("}")): 100}
    choice = chat(
        client, response_format={"type": "json_object"}, max_tokens=400, logit_bias=closing, temperature=0
    ).choices[0]
    assert json.loads(choice.message.content) == {} and choice.finish_reason == "stop"
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=400, extra_body={"response_format": as_format(SCHEMA)}, n=3
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.text), SCHEMA)


def test_the_grammar_holds_on_every_path_of_a_draft():
    """Nodes in any order, also below tokens that the grammar excludes, agree with a matcher made anew for each."""
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    prompt = [5, 6, 7]

    def allowed(processor, text, extra=()):
        ids = torch.tensor([prompt + tokenizer(text).input_ids + list(extra)])
        return processor(ids, torch.zeros(1, VOCAB_SIZE)).isfinite()[0]

    paths = ["", '{"id', '{"id":12', '{"id":7,"kind":"c', '{"i', '{"id":12,"kind":"dog","tags":[]}', '{"x', '{"id":12']
    shared = compiler.processor(SCHEMA, len(prompt), "response_format")
    for path in paths:
        alone = compiler.processor(SCHEMA, len(prompt), "response_format")
        assert torch.equal(allowed(shared, path), allowed(alone, path)), path
    whole = allowed(shared, '{"id":12,"kind":"dog","tags":[]}')
    assert whole[EOS] and not whole[tokenizer("{").input_ids[0]]
    assert not allowed(shared, '{"id":12')[EOS]
    assert allowed(shared, "{}x").all(), "below an excluded token nothing is said"
    assert allowed(shared, '{"id":12,"kind":"dog","tags":[]}', [EOS, 9]).all(), "nor below the end"


def test_a_named_tool_is_called(client):
    choice = chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0]
    [call] = choice.message.tool_calls
    assert call.function.name == "weather" and choice.message.content is None and choice.finish_reason == "stop"
    jsonschema.validate(json.loads(call.function.arguments), PLACE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_required(client, stream):
    answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=5, stream=stream)
    if stream:
        chunks = list(answer)
        calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
        assert not any(choice.delta.content for chunk in chunks for choice in chunk.choices)
        reason = chunks[-1].choices[0].finish_reason
    else:
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
    [call] = calls
    assert call.id and reason == "tool_calls"
    tool = next(tool for tool in TOOLS if tool["function"]["name"] == call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])


def test_the_model_sees_the_tools_and_their_results(http):
    def text(**body):
        tokens = http.post("/tokenize", json={"messages": CHAT} | body).json()["tokens"]
        return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]

    assert '"name": "weather"' in text(tools=TOOLS) and "weather" not in text()
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    assert '{"name": "weather", "arguments": {"city": "Ulm"}}' in text(messages=messages)
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}
    used = http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    assert used == http.post("/tokenize", json={"messages": CHAT}).json()["count"]


def test_tools_that_the_template_would_drop_are_refused(model):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with serving(with_template(model, template)) as served, served.http() as http:
        body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 1}
        error = http.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "tools" and error["code"] == 400


def test_without_a_chat_template_there_is_no_chat(model):
    with serving(with_template(model, None)) as served, served.http() as http:
        error = http.post("/v1/chat/completions", json={"messages": CHAT}).json()["error"]
        assert error["code"] == 400 and "no chat template" in error["message"]
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'
NAMES = ["weather", "time"]
WEATHER = ("weather", {"city": "Ulm"})


@pytest.mark.parametrize(
    "tool_format, text, content, calls",
    [
        (HERMES, f"Wait. <tool_call>\n{CALL}\n</tool_call>", "Wait. ", [WEATHER]),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [WEATHER, WEATHER]),
        (HERMES, f"<tool_call>{CALL}", "", [WEATHER]),
        (HERMES, "<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
        (HERMES, "1 <tool or 2", "1 <tool or 2", []),
        (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
        (LLAMA3, '{"name": "weather", "parameters": {"city": "Ulm"}}', "", [WEATHER]),
        (LLAMA3, f"{CALL}; {CALL}", "", [WEATHER, WEATHER]),
        (LLAMA3, f"<|python_tag|>{CALL}", "", [WEATHER]),
        (LLAMA3, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        (LLAMA3, f"It is: {CALL}", f"It is: {CALL}", []),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", [WEATHER]),
        (MISTRAL, f"[{CALL}, {CALL}]", "", [WEATHER, WEATHER]),
        (MISTRAL, '[TOOL_CALLS]weather{"city": "Ulm"}', "", [WEATHER]),
        (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", []),
        (MISTRAL, "[" * 5000, "[" * 5000, []),
    ],
)
def test_tool_call_formats_whole_and_letter_by_letter(tool_format, text, content, calls):
    for size in (len(text), 1, 3):
        reader = ToolReader(tool_format, NAMES)
        given = "".join(reader.feed(text[at : at + size]) for at in range(0, len(text), size))
        rest, found = reader.finish()
        assert given + rest == (text if content is None else content)
        assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == calls


def test_text_before_a_call_is_not_held_back():
    reader = ToolReader(HERMES, NAMES)
    assert reader.feed("Let me see <to") == "Let me see "
    assert reader.feed("day") == "<today"


def test_formats_are_told_by_the_tokenizer():
    assert set(FORMATS) == {"hermes", "llama3_json", "mistral"}
    assert detect_format(TextCodec(byte_tokenizer(), VOCAB_SIZE)) is HERMES
    assert detect_format(TextCodec(byte_tokenizer("[TOOL_CALLS]"), VOCAB_SIZE)) is MISTRAL
    assert detect_format(TextCodec(byte_tokenizer("x"), VOCAB_SIZE)) is LLAMA3
