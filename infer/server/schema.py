"""What clients send. Types are strict (no "2" for 2); fields that are not named here are kept as extras, so that
`limits.refuse_unsupported` can tell those that would change the output from those that may be ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

INT64 = 2**63

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Body(Strict):
    """A request's body."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(Strict):
    """include_usage: a last chunk with the usage. continuous_usage_stats: usage so far on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Strict):
    """`strict` is always so: the answer follows the schema by construction."""

    name: str = Field(max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class MedusaOptions(Strict):
    """This server's own. speculate: False decodes a token at a time. marks: which text had been drafted. statistics:
    how decoding went, as `metrics` of the response. timeout_s: seconds after which the request is given up; the
    server's own limit holds too."""

    model_config = ConfigDict(extra="forbid")

    speculate: bool = True
    marks: bool = False
    statistics: bool = False
    timeout_s: float | None = Field(default=None, gt=0)


class GenerationBody(Body):
    """What chat and plain completions share. null means the default."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=100, description="0: greedy; default 1.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="-1 or 0: all tokens.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = Field(default=None, description="Give the ids of prompt and answer, too.")
    user: str | None = None
    medusa: MedusaOptions | None = None


class CompletionBody(GenerationBody):
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool | None = None


class ContentPart(Strict):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class FunctionCall(Strict):
    name: str
    arguments: str


class MessageToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    name: str


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class TokenizeBody(Body):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]
