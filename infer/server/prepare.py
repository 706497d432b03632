"""From a request's body to the engine's requests: prompts times n, choice p * n + i at that index."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa.sampling import SamplingParams

from ..request import Request
from .context import ServerContext
from .errors import bad_request, from_value_error
from .processors import LogitBias
from .schema import GenerationBody, MedusaOptions

# makes one choice's logits processor, given the number of prompt tokens
MakeGrammar = Callable[[int], object]


@dataclass(frozen=True)
class Job:
    """max_tokens: of every choice; 0 gives the prompt back (echo), for which the engine still runs a token."""

    body: GenerationBody
    prompts: list[list[int]]
    requests: list[Request]

    @property
    def n(self) -> int:
        return len(self.requests) // len(self.prompts)

    @property
    def options(self) -> MedusaOptions:
        return self.body.medusa or MedusaOptions()


def make_job(
    context: ServerContext,
    body: GenerationBody,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    prompt_field: str,
    num_logprobs: int | None = None,
    prompt_logprobs: bool = False,
    make_grammar: MakeGrammar | None = None,
) -> Job:
    """max_tokens: None for whatever the context has left. Raises ApiError 400 for what does not fit."""
    requests = []
    for ids in prompts:
        room = _room(context, ids, prompt_field)
        if max_tokens is not None and max_tokens > room:
            raise bad_request(
                f"max_tokens: got {max_tokens} and a prompt of {len(ids)} tokens, this server's longest context is "
                f"{context.limits.max_model_len}; ask for at most {room}",
                "max_tokens",
            )
        for index in range(body.n or 1):
            try:
                requests.append(
                    Request(
                        ids,
                        max(1, room if max_tokens is None else max_tokens),
                        frozenset() if body.ignore_eos else context.base_model.eos_token_ids,
                        context.base_model.tokenizer,
                        _stop(body),
                        _sampling(context, body, index, len(ids), make_grammar),
                        stop_token_ids=frozenset(body.stop_token_ids or ()),
                        num_logprobs=num_logprobs,
                        prompt_logprobs=prompt_logprobs,
                        speculate=body.medusa is None or body.medusa.speculate,
                        deadline=time.monotonic() + _timeout(context, body),
                    )
                )
            except ValueError as error:
                raise from_value_error(error, prompt_field) from error
    return Job(body, prompts, requests)


def _room(context: ServerContext, ids: Sequence[int], prompt_field: str) -> int:
    room = context.limits.max_model_len - len(ids)
    if not ids:
        raise bad_request(f"{prompt_field}: got no tokens at all, expected at least one", prompt_field)
    if room < 1:
        raise bad_request(
            f"{prompt_field}: got {len(ids)} tokens, this server's longest context is {context.limits.max_model_len} "
            "with the answer; shorten it",
            prompt_field,
        )
    return room


def _stop(body: GenerationBody) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or ())


def _timeout(context: ServerContext, body: GenerationBody) -> float:
    asked = body.medusa.timeout_s if body.medusa else None
    return min(asked or context.limits.request_timeout_s, context.limits.request_timeout_s)


def _sampling(
    context: ServerContext, body: GenerationBody, index: int, num_prompt_tokens: int, make_grammar: MakeGrammar | None
) -> SamplingParams:
    """Of choice `index` of a prompt: each has a seed of its own. Raises ValueError out of a range."""
    processors: list[object] = []
    if body.logit_bias:
        processors.append(LogitBias.of(body.logit_bias, context.codec.vocab_size))
    if make_grammar is not None:
        processors.append(make_grammar(num_prompt_tokens))
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=None if body.seed is None else body.seed + index,
        processors=tuple(processors),  # type: ignore[arg-type]
    )
