"""`response_format` and forced tool calls as grammars."""

from __future__ import annotations

import json
from typing import Any

from .context import ServerContext
from .errors import bad_request
from .grammar import ANY_OBJECT
from .prepare import MakeGrammar
from .schema import GenerationBody, Tool


def grammar_of(context: ServerContext, body: GenerationBody) -> MakeGrammar | None:
    """What makes the logits processor of each choice; None where any text will do. Raises ApiError 400."""
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return schema_grammar(context, body, ANY_OBJECT, "response_format")
    if form.json_schema is None:
        raise bad_request("response_format: type json_schema needs json_schema", "response_format")
    return schema_grammar(context, body, form.json_schema.json_schema, "response_format")


def schema_grammar(context: ServerContext, body: GenerationBody, schema: dict[str, Any], param: str) -> MakeGrammar:
    if body.ignore_eos:
        raise bad_request(f"ignore_eos: does not go with {param}, whose JSON has an end", "ignore_eos")
    if len(json.dumps(schema)) > context.limits.max_schema_bytes:
        raise bad_request(f"{param}: the schema is over {context.limits.max_schema_bytes} bytes", param)
    return lambda num_prompt_tokens: context.grammar.processor(schema, num_prompt_tokens, param)


def call_schema(tools: list[Tool], *, only_one: bool) -> dict[str, Any]:
    """Of a list of calls to any of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": arguments_schema(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    return schema | ({"maxItems": 1} if only_one else {})


def arguments_schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or ANY_OBJECT
