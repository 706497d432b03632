"""What a request may ask for: sizes, and the fields that this server cannot honour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import bad_request
from .schema import ChatBody, CompletionBody, GenerationBody

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Limits:
    """max_model_len: tokens of prompt and answer together. max_body_bytes: of a request. max_choices: prompts times n.
    max_stop: stop strings (and stop token ids) of a request; max_stop_length: characters of one. max_schema_bytes: of a
    JSON schema. request_timeout_s: until a request is given up. body_timeout_s: for a client to send its body."""

    max_model_len: int
    max_body_bytes: int = 4 << 20
    max_choices: int = 64
    max_stop: int = 16
    max_stop_length: int = 256
    max_logit_bias: int = 1024
    max_tools: int = 128
    max_schema_bytes: int = 64 << 10
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0


# Fields of OpenAI's and vLLM's protocols that change the output and that this server does not have, with the values at
# which they do nothing (null always does nothing).
_UNSUPPORTED: dict[str, Sequence[Any]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_UNSUPPORTED_COMPLETION: dict[str, Sequence[Any]] = {"prompt_embeds": (), "suffix": ("",)}
_UNSUPPORTED_CHAT: dict[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def refuse_unsupported(body: GenerationBody) -> None:
    """Raises ApiError 400 with the field's name, for the first one that would change the output and cannot be had."""
    specific = _UNSUPPORTED_CHAT if isinstance(body, ChatBody) else _UNSUPPORTED_COMPLETION
    _refuse(body.model_extra or {}, _UNSUPPORTED | specific)


def _refuse(given: Mapping[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> None:
    for name, value in given.items():
        neutral = unsupported.get(name)
        if neutral is None or value is None or any(value == same and type(value) is type(same) for same in neutral):
            continue
        rest = f"; leave it out or at {', '.join(map(repr, neutral))}" if neutral else "; leave it out"
        raise bad_request(f"{name}: this server cannot honour it{rest}", name)


def check_sizes(body: GenerationBody, num_prompts: int, limits: Limits) -> None:
    """Raises ApiError 400 with the name of a field that asks for too much, or that does not go with another."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    too_many = (
        ("n", num_prompts * (body.n or 1), limits.max_choices, "choices (prompts times n)"),
        ("stop", len(stop), limits.max_stop, "stop strings"),
        ("stop", max(map(len, stop), default=0), limits.max_stop_length, "characters of a stop string"),
        ("stop_token_ids", len(body.stop_token_ids or ()), limits.max_stop, "ids"),
        ("logit_bias", len(body.logit_bias or ()), limits.max_logit_bias, "tokens"),
    )
    for name, got, most, what in too_many:
        if got > most:
            raise bad_request(f"{name}: got {got} {what}, expected at most {most}", name)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: goes with stream=true only", "stream_options")
    if isinstance(body, CompletionBody):
        _check_logprobs("logprobs", body.logprobs)
    if isinstance(body, ChatBody):
        _check_logprobs("top_logprobs", body.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs: goes with logprobs=true only", "top_logprobs")
        if len(body.tools or ()) > limits.max_tools:
            raise bad_request(f"tools: got {len(body.tools or ())}, expected at most {limits.max_tools}", "tools")


def _check_logprobs(name: str, value: int | None) -> None:
    if (value or 0) > MAX_LOGPROBS:
        raise bad_request(f"{name}: got {value}, expected at most {MAX_LOGPROBS}", name)
