"""Bodies drawn from the server's own OpenAPI schema, and bodies near it: 4xx or a valid 200, never 5xx.

MEDUSA_FUZZ_BODIES: how many in all (default 300).
"""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from serving import served_model, serving

NUM_BODIES = int(os.environ.get("MEDUSA_FUZZ_BODIES", "300"))
ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
QUICK = {"max_tokens": 3, "max_completion_tokens": 3}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=20)}
)
# What a route needs, and what clients add, all of it right as far as a field alone can be.
needed = {
    "/v1/chat/completions": {"messages": st.lists(message, min_size=1, max_size=3)},
    "/v1/completions": {
        "prompt": st.one_of(
            st.text(min_size=1, max_size=20),
            st.lists(st.integers(0, 271), min_size=1, max_size=5),
            st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
        )
    },
    "/tokenize": {"prompt": st.text(max_size=20)},
    "/detokenize": {"tokens": st.lists(st.integers(0, 271), max_size=5)},
}
added = {
    "model": st.sampled_from(["tiny", None]),
    "temperature": st.sampled_from([0, 0.5, 1, 2.0, None]),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.one_of(st.text(min_size=1, max_size=3), st.lists(st.text(min_size=1, max_size=3), max_size=4)),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 271).map(str), st.floats(-100, 100), max_size=3),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}]),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "medusa": st.fixed_dictionaries(
        {}, optional={"speculate": st.booleans(), "marks": st.booleans(), "statistics": st.booleans()}
    ),
}
odd = {
    "temperature": st.floats(),
    "top_p": st.floats(),
    "n": st.integers(-1, 100),
    "seed": st.integers(-(2**70), 2**70),
    "stop": st.lists(st.text(max_size=2), max_size=20),
    "logit_bias": st.dictionaries(st.text(max_size=4), st.floats(), max_size=3),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 25)),
    "top_logprobs": st.integers(-1, 25),
    "tools": st.just([TOOL]),
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    "stream_options": st.just({"include_usage": True}),
    "max_tokens": st.integers(-1, 600),
    "suffix": st.text(max_size=3),
    "prompt": st.lists(st.integers(-5, 400), max_size=5),
    "tokens": st.lists(st.integers(-5, 400), max_size=5),
}
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def fuzzed():
    with serving(served_model(), request_timeout_s=20) as served, served.http() as http:
        api = http.get("/openapi.json").json()
        yield served, http, api, {route: Draft202012Validator(answer_schema(api, route)) for route in ROUTES}


def answer_schema(api, route):
    schema = api["paths"][route]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    return moved(schema | {"$defs": api["components"]["schemas"]})


def moved(schema):
    return json.loads(json.dumps(schema).replace("#/components/schemas/", "#/$defs/"))


def check(fuzzed, route, body):
    _, http, _, validators = fuzzed
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(route, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, (body, response.text)
    if response.status_code == 200 and response.headers["content-type"].startswith("application/json"):
        validators[route].validate(response.json())
    elif response.status_code == 200:
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.status_code


def fuzz(share):
    return settings(
        max_examples=max(1, round(NUM_BODIES * share / len(ROUTES))),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def of_schema(schema, definitions, depth=0):
    """Values of a JSON schema, as far as pydantic writes them; limits are passed at times, on purpose."""
    if "$ref" in schema:
        return of_schema(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions, depth)
    if "anyOf" in schema:
        return st.one_of([of_schema(option, definitions, depth) for option in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "object":
        fields = {
            name: of_schema(field, definitions, depth + 1) for name, field in schema.get("properties", {}).items()
        }
        required = {name: fields.pop(name) for name in schema.get("required", ())}
        named = st.fixed_dictionaries(required, optional=fields if depth < 4 else {})
        if fields or required:
            return named
        value = schema.get("additionalProperties")
        return st.dictionaries(
            st.text(max_size=5),
            of_schema(value, definitions, depth + 1) if isinstance(value, dict) else junk,
            max_size=3,
        )
    if kind == "array":
        return st.lists(of_schema(schema["items"], definitions, depth + 1), max_size=3)
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", -5)), schema.get("maximum", 300)
    return {
        "string": st.text(max_size=8),
        "integer": st.integers(max(low, -(2**64)) - 1, min(high, 2**64)),
        "number": st.floats(low - 1, high + 1),
        "boolean": st.booleans(),
        "null": st.none(),
    }.get(kind, junk)


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_near_what_clients_send(fuzzed, route):
    seen = []
    generates = route.startswith("/v1")
    names = odd if generates else ("prompt", "tokens")
    wrong = st.one_of([st.tuples(st.just(name), st.one_of(odd[name], junk)) for name in names])

    @fuzz(0.6)
    @given(st.fixed_dictionaries(needed[route], optional=added if generates else {}), st.lists(wrong, max_size=2))
    def run(body, replaced):
        seen.append(check(fuzzed, route, QUICK | body | dict(replaced)))

    run()
    assert NUM_BODIES < 100 or {200, 400} <= set(seen), "both sides of the line must be met"
    assert fuzzed[1].get("/health").status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_of_the_schema(fuzzed, route):
    api = fuzzed[2]
    schema = api["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]

    @fuzz(0.25)
    @given(of_schema(schema, api["components"]["schemas"]))
    def run(body):
        check(fuzzed, route, QUICK | body)

    run()
    assert fuzzed[1].get("/health").status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_of_anything(fuzzed, route):
    @fuzz(0.15)
    @given(st.one_of(junk, st.binary(max_size=50)))
    def run(body):
        check(fuzzed, route, body)

    run()
    load = fuzzed[0].wait_idle()
    assert load.kv_tokens_used == 0 and fuzzed[0].context.service.alive
