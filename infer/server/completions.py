"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..logprobs import TokenLogprob
from ..request import Piece, Request
from ..service import Finished
from .answers import Head, count_tokens, last_chunk_fields, metrics_fields, new_answers, usage_of, usage_so_far
from .context import ServerContext
from .errors import bad_request
from .json_route import JsonRoute
from .limits import check_sizes, refuse_unsupported
from .logprobs import CompletionLogprobsWriter, joined
from .prepare import Job, make_job
from .response_format import grammar_of
from .responses import CompletionChoice, CompletionLogprobs, CompletionResponse, MedusaMarks, to_json
from .schema import CompletionBody
from .streams import EventStream, Running, unless_gone

DEFAULT_MAX_TOKENS = 16


def make_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", response_model=CompletionResponse, tags=["completions"])
    async def create_completion(body: CompletionBody, http: HttpRequest) -> Response:
        """Continue a text, several texts, or token ids."""
        context.check_model(body.model)
        job = await asyncio.to_thread(_prepare, context, body)
        context.metrics.on_request(job)
        completion = Completion(context, body, job)
        if body.stream:
            return EventStream(completion.running, completion.chunks())
        return JSONResponse(await unless_gone(http, completion.whole()))

    return router


def _prepare(context: ServerContext, body: CompletionBody) -> Job:
    refuse_unsupported(body)
    prompts = _prompts(context, body)
    check_sizes(body, len(prompts), context.limits)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens: got 0, expected at least 1 (0 goes with echo=true only)", "max_tokens")
    return make_job(
        context,
        body,
        prompts,
        max_tokens=max_tokens,
        prompt_field="prompt",
        num_logprobs=body.logprobs,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        make_grammar=grammar_of(context, body),
    )


def _prompts(context: ServerContext, body: CompletionBody) -> list[list[int]]:
    prompt: Any = body.prompt
    if not prompt:
        raise bad_request("prompt: got nothing, expected text or token ids", "prompt")
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    if len(several) > context.limits.max_choices:
        raise bad_request(f"prompt: got {len(several)}, expected at most {context.limits.max_choices}", "prompt")
    special = body.add_special_tokens is not False
    return [_prompt_ids(context, one, special) for one in several]


def _prompt_ids(context: ServerContext, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
    if isinstance(prompt, str):
        return context.codec.encode(prompt, add_special_tokens=add_special_tokens)
    context.codec.check_ids(prompt, "prompt")
    return prompt


@dataclass
class Writer:
    """One choice's way into the response. echo: still to be given back."""

    choice: int
    request: Request
    echo: str | None
    logprobs: CompletionLogprobsWriter | None
    parts: list[CompletionLogprobs] = field(default_factory=list)


class Completion:
    """One request for completions on its way."""

    def __init__(self, context: ServerContext, body: CompletionBody, job: Job) -> None:
        """Submits it. Raises ApiError where it is not taken."""
        self.context, self.body, self.job = context, body, job
        self.head = Head.new(context, "cmpl", "text_completion")
        self.answers = new_answers(context, job)
        self.writers = [self._writer(index, request) for index, request in enumerate(job.requests)]
        self.running = Running(context, job.requests)

    def _writer(self, index: int, request: Request) -> Writer:
        logprobs = CompletionLogprobsWriter(self.context.codec) if self.body.logprobs is not None else None
        return Writer(index, request, self._echo(index) if self.body.echo else None, logprobs)

    def _echo(self, index: int) -> str:
        prompt: Any = self.body.prompt
        given = prompt if isinstance(prompt, str) else prompt[index // self.job.n]
        return given if isinstance(given, str) else self.context.codec.decode(self.job.prompts[index // self.job.n])

    async def whole(self) -> dict[str, Any]:
        texts = [""] * len(self.answers)
        async for index, event in self._events():
            writer = self.writers[index]
            text, logprobs = self._gain(writer, event)
            texts[index] += text
            writer.parts += [logprobs] if logprobs else []
            self.answers[index].add(event)
        choices = [self._choice(writer, texts[writer.choice]) for writer in self.writers]
        usage = usage_of(self.job, count_tokens(self.answers))
        response = CompletionResponse(**self.head.fields(), choices=choices, usage=usage, **metrics_fields(self.job))
        return to_json(response)

    def _choice(self, writer: Writer, text: str) -> CompletionChoice:
        answer, ids = self.answers[writer.choice], bool(self.body.return_token_ids)
        return CompletionChoice(
            index=writer.choice,
            text=text,
            logprobs=joined(writer.parts) if writer.logprobs else None,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if ids else None,
            prompt_token_ids=writer.request.prompt_ids if ids else None,
            medusa=answer.all_marks(),
        )

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        async for index, event in self._events():
            writer = self.writers[index]
            first = writer.echo is not None or not self.answers[index].token_ids
            text, logprobs = self._gain(writer, event)
            marks = self.answers[index].add(event)
            if text or logprobs or isinstance(event, Finished) or self.body.return_token_ids:
                yield self._chunk(writer, event, text, logprobs, marks, first)
        if fields := last_chunk_fields(self.job, count_tokens(self.answers)):
            yield to_json(CompletionResponse(**self.head.fields(), choices=[], **fields))

    def _chunk(
        self,
        writer: Writer,
        event: Piece | Finished,
        text: str,
        logprobs: CompletionLogprobs | None,
        marks: MedusaMarks | None,
        first: bool,
    ) -> dict[str, Any]:
        ids = event.token_ids if isinstance(event, Piece) and self.body.return_token_ids else None
        choice = CompletionChoice(
            index=writer.choice,
            text=text,
            logprobs=logprobs,
            finish_reason=event.finish_reason if isinstance(event, Finished) else None,
            stop_reason=event.stop_reason if isinstance(event, Finished) else None,
            token_ids=ids,
            prompt_token_ids=writer.request.prompt_ids if first and ids is not None else None,
            medusa=marks,
        )
        so_far = usage_so_far(self.job, self.answers)
        return to_json(CompletionResponse(**self.head.fields(), choices=[choice], **so_far))

    async def _events(self) -> AsyncIterator[tuple[int, Piece | Finished]]:
        """What the engine gives; with max_tokens=0 the one token that it had to make is dropped."""
        async for index, event in self.running.events():
            if self.body.max_tokens != 0:
                yield index, event
            elif isinstance(event, Piece):
                yield index, Piece("", [], 0, [])
            else:
                yield index, Finished("length", None)

    def _gain(self, writer: Writer, event: Piece | Finished) -> tuple[str, CompletionLogprobs | None]:
        """Text and logprobs; the prompt's come with the first piece where it is echoed."""
        echo, writer.echo = writer.echo, None
        text = (echo or "") + (event.text if isinstance(event, Piece) else "")
        if writer.logprobs is None or not isinstance(event, Piece):
            return text, None
        tokens: list[TokenLogprob | None] = [*(event.logprobs or [])]
        ids = event.token_ids
        if echo is not None:
            tokens = [*writer.request.prompt_token_logprobs, *tokens]
            ids = [*writer.request.prompt_ids, *ids]
        return text, writer.logprobs.write(tokens, ids)
