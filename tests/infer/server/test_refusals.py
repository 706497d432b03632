"""What is not honoured is refused with its name, in OpenAI's shape, whatever the route."""

from __future__ import annotations

import pytest

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PROMPT = {"prompt": "hi", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "look"}}


def check_error(response, status, param=None, kind="BadRequestError"):
    body = response.json()
    assert response.status_code == status, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, status), error
    return error["message"]


@pytest.mark.parametrize(
    "route, extra, param",
    [
        (CHAT, {"temperature": -0.1}, "temperature"),
        (CHAT, {"temperature": 1e-6}, "temperature"),
        (CHAT, {"temperature": "1"}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_p": 1.01}, "top_p"),
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"min_p": 2}, "min_p"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"presence_penalty": 2.1}, "presence_penalty"),
        (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 65}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"seed": 2**63}, "seed"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"stop": ["x"] * 17}, "stop"),
        (CHAT, {"stop": "x" * 257}, "stop"),
        (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids"),
        (CHAT, {"logit_bias": {"272": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"3": 101}}, "logit_bias"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 512}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}},
            "response_format",
        ),
        (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (CHAT, {"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"medusa": {"tree": "x"}}, "medusa"),
        (COMPLETE, {"prompt": ""}, "prompt"),
        (COMPLETE, {"prompt": []}, "prompt"),
        (COMPLETE, {"prompt": [[]]}, "prompt"),
        (COMPLETE, {"prompt": [272]}, "prompt"),
        (COMPLETE, {"prompt": [-1]}, "prompt"),
        (COMPLETE, {"prompt": ["a"] * 65}, "prompt"),
        (COMPLETE, {"prompt": ["a"] * 33, "n": 2}, "n"),
        (COMPLETE, {"prompt": "x" * 512}, "prompt"),
        (COMPLETE, {"logprobs": 21}, "logprobs"),
        (COMPLETE, {"max_tokens": 0}, "max_tokens"),
        (COMPLETE, {"prompt": None}, "prompt"),
    ],
)
def test_a_bad_value_is_named(http, route, extra, param):
    check_error(http.post(route, json=(MESSAGES if route == CHAT else PROMPT) | extra), 400, param)


UNSUPPORTED = [
    (COMPLETE, "suffix", "x", ""),
    (COMPLETE, "best_of", 3, 1),
    (CHAT, "audio", {"voice": "a"}, None),
    (CHAT, "modalities", ["audio"], ["text"]),
    (CHAT, "functions", [{"name": "f"}], []),
    (CHAT, "function_call", "auto", "none"),
    (CHAT, "prediction", {"type": "content", "content": "x"}, None),
    (CHAT, "reasoning_effort", "high", None),
    (CHAT, "service_tier", "flex", "auto"),
    (CHAT, "store", True, False),
    (CHAT, "verbosity", "low", "medium"),
    (CHAT, "web_search_options", {}, None),
    (CHAT, "chat_template", "{{ 1 }}", None),
    (CHAT, "min_tokens", 1, 0),
    (CHAT, "use_beam_search", True, False),
    (CHAT, "structured_outputs", {"regex": "a"}, None),
    (CHAT, "guided_json", "{}", None),
    (CHAT, "skip_special_tokens", False, True),
    (CHAT, "include_stop_str_in_output", True, False),
    (COMPLETE, "truncate_prompt_tokens", 3, None),
]


@pytest.mark.parametrize("route, name, asked, neutral", UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused_unless_it_changes_nothing(http, route, name, asked, neutral):
    body = MESSAGES if route == CHAT else PROMPT
    assert f"{name}: this server cannot honour it" in check_error(
        http.post(route, json=body | {name: asked}), 400, name
    )
    assert http.post(route, json=body | {name: neutral}).status_code == 200


def test_fields_that_change_nothing_are_ignored(http):
    extra = {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "made_up": [1, 2]}
    assert http.post(CHAT, json=MESSAGES | extra).status_code == 200


@pytest.mark.parametrize(
    "method, path, status, kind",
    [
        ("GET", "/nowhere", 404, "NotFoundError"),
        ("POST", "/v1/embeddings", 404, "NotFoundError"),
        ("GET", CHAT, 405, "MethodNotAllowedError"),
        ("DELETE", "/v1/models", 405, "MethodNotAllowedError"),
    ],
)
def test_unknown_routes_and_methods(http, method, path, status, kind):
    check_error(http.request(method, path), status, None, kind)


@pytest.mark.parametrize(
    "content, content_type",
    [
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', "application/json"),
        (b'{"prompt": "a", "temperature": NaN}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt": "a"}', "text/plain"),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded"),
        (b"a=b", "multipart/form-data"),
    ],
)
def test_bodies_that_are_no_json_object(http, content, content_type):
    for path in (COMPLETE, CHAT, "/tokenize", "/detokenize"):
        check_error(http.post(path, content=content, headers={"Content-Type": content_type}), 400)


def test_an_infinite_number_is_named(http):
    headers = {"Content-Type": "application/json"}
    check_error(
        http.post(COMPLETE, content=b'{"prompt": "a", "temperature": 1e400}', headers=headers), 400, "temperature"
    )


def test_the_message_does_not_repeat_what_was_sent(http):
    secret = "do-not-repeat-me"
    response = http.post(CHAT, json={"messages": [{"role": secret, "content": {"x": secret}}]})
    assert secret not in response.text and response.status_code == 400


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES["messages"]}])
def test_tokenize_wants_one_of_two(http, body):
    check_error(http.post("/tokenize", json=body), 400, "prompt")


def test_tokens_there_and_back(http):
    body = http.post("/tokenize", json={"prompt": "häß", "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) == 5 and body["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "häß"}
    check_error(http.post("/detokenize", json={"tokens": [999]}), 400, "tokens")
