"""What the server sends. Fields that have no value are left out but where clients expect a null."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, field_serializer


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class Mark(BaseModel):
    """A bit of the answer's text; the texts joined are the text that they come with."""

    text: str
    drafted: bool


class MedusaMarks(BaseModel):
    """num_drafted_accepted: of the tokens of this chunk or choice, those that had been drafted."""

    num_tokens: int
    num_drafted_accepted: int
    marks: list[Mark]


class SpeculativeDecoding(BaseModel):
    """vLLM's field names. acceptance_histogram[j]: steps that kept j drafted tokens. num_draft_tokens counts every node
    of a tree; num_spec_tokens is the longest run that a step could keep."""

    mean_acceptance_length: float
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Timing(BaseModel):
    """Seconds."""

    queue_s: float
    prefill_s: float
    decode_s: float
    time_to_first_token_s: float


class ResponseMetrics(BaseModel):
    speculative_decoding: SpeculativeDecoding
    timing: Timing


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    medusa: MedusaMarks | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(ToolCall):
    index: int


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    medusa: MedusaMarks | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    medusa: MedusaMarks | None = None

    @field_serializer("delta")
    def _only_what_changed(self, delta: Delta) -> dict[str, Any]:
        return delta.model_dump(exclude_none=True)


class Envelope(BaseModel):
    """What completions of both kinds and their chunks begin with."""

    id: str
    object: str
    created: int
    model: str


class CompletionResponse(Envelope):
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None


class ChatResponse(Envelope):
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunk(Envelope):
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None
    prompt_token_ids: list[int] | None = None


class ErrorContent(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorContent


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "medusa"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    version: str


NULLABLE = {"logprobs", "finish_reason", "stop_reason", "content", "param", "parent", "draft_acceptance_rate"}


def to_json(model: BaseModel) -> dict[str, Any]:
    """As clients expect it: no nulls but those of the fields that have always been there."""
    content: dict[str, Any] = _pruned(model.model_dump(mode="json"))
    return content


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None or key in NULLABLE}
    return [_pruned(item) for item in value] if isinstance(value, list) else value
