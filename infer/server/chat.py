"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..request import Piece
from ..service import Finished
from .answers import (
    Answer,
    Head,
    collect,
    count_tokens,
    last_chunk_fields,
    metrics_fields,
    new_answers,
    usage_of,
    usage_so_far,
)
from .chat_tools import ToolUse
from .context import ServerContext
from .errors import bad_request
from .json_route import JsonRoute
from .limits import check_sizes, refuse_unsupported
from .logprobs import chat_logprobs
from .prepare import Job, make_job
from .responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    Delta,
    MedusaMarks,
    ToolCall,
    ToolCallDelta,
    to_json,
)
from .schema import ChatBody
from .streams import EventStream, Running, unless_gone


def make_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", response_model=ChatResponse, tags=["chat"])
    async def create_chat_completion(body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        context.check_model(body.model)
        tool_use, job = await asyncio.to_thread(_prepare, context, body)
        context.metrics.on_request(job)
        chat = Chat(context, body, job, tool_use)
        if body.stream:
            return EventStream(chat.running, chat.chunks())
        return JSONResponse(await unless_gone(http, chat.whole()))

    return router


def _prepare(context: ServerContext, body: ChatBody) -> tuple[ToolUse, Job]:
    refuse_unsupported(body)
    check_sizes(body, 1, context.limits)
    if body.max_tokens == 0:
        raise bad_request("max_tokens: got 0, expected at least 1", "max_tokens")
    tool_use = ToolUse.of(context, body)
    ids = context.codec.encode_chat(body.messages, tools=tool_use.tools, template_kwargs=body.chat_template_kwargs)
    job = make_job(
        context,
        body,
        [ids],
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        prompt_field="messages",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        make_grammar=tool_use.grammar(context, body),
    )
    return tool_use, job


class Chat:
    """One request for chat completions on its way."""

    def __init__(self, context: ServerContext, body: ChatBody, job: Job, tool_use: ToolUse) -> None:
        """Submits it. Raises ApiError where it is not taken."""
        self.context, self.body, self.job, self.tool_use = context, body, job, tool_use
        self.answers = new_answers(context, job)
        self.running = Running(context, job.requests)

    async def whole(self) -> dict[str, Any]:
        await collect(self.running, self.answers)
        head = Head.new(self.context, "chatcmpl", "chat.completion")
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        usage = usage_of(self.job, count_tokens(self.answers))
        fields = head.fields() | metrics_fields(self.job) | self._prompt_ids()
        return to_json(ChatResponse(choices=choices, usage=usage, **fields))

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        reader = self.tool_use.reader()
        plain = reader.feed(answer.text)
        rest, calls = reader.finish()
        content = plain + rest
        return ChatChoice(
            index=index,
            message=AnswerMessage(content=None if calls and not content.strip() else content, tool_calls=calls or None),
            logprobs=chat_logprobs(self.context.codec, answer.logprobs) if self.body.logprobs else None,
            finish_reason=self.tool_use.finish_reason(answer.finish_reason, len(calls)),
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if self.body.return_token_ids else None,
            medusa=answer.all_marks(),
        )

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.job.prompts[0]} if self.body.return_token_ids else {}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        head = Head.new(self.context, "chatcmpl", "chat.completion.chunk")
        readers = [self.tool_use.reader() for _ in self.answers]
        for index in range(len(self.answers)):
            yield self._chunk(head, index, Delta(role="assistant", content=""), **self._prompt_ids())
        async for index, event in self.running.events():
            marks = self.answers[index].add(event)
            if isinstance(event, Finished):
                rest, calls = readers[index].finish()
                for delta in _last_deltas(rest, calls):
                    yield self._chunk(head, index, delta)
                yield self._end(head, index, len(calls))
            elif (text := readers[index].feed(event.text)) or event.logprobs or marks or self.body.return_token_ids:
                yield self._chunk(head, index, Delta(content=text), event=event, marks=marks)
        if fields := last_chunk_fields(self.job, count_tokens(self.answers)):
            yield to_json(ChatChunk(**head.fields(), choices=[], **fields))

    def _end(self, head: Head, index: int, num_calls: int) -> dict[str, Any]:
        answer = self.answers[index]
        reason = self.tool_use.finish_reason(answer.finish_reason, num_calls)
        return self._chunk(head, index, Delta(), finish_reason=reason, stop_reason=answer.stop_reason)

    def _chunk(
        self,
        head: Head,
        index: int,
        delta: Delta,
        *,
        event: Piece | None = None,
        marks: MedusaMarks | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> dict[str, Any]:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(event),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=event.token_ids if event and self.body.return_token_ids else None,
            medusa=marks,
        )
        so_far = usage_so_far(self.job, self.answers)
        return to_json(ChatChunk(**head.fields(), choices=[choice], prompt_token_ids=prompt_token_ids, **so_far))

    def _logprobs(self, event: Piece | None) -> ChatLogprobs | None:
        return chat_logprobs(self.context.codec, event.logprobs) if event and event.logprobs else None


def _last_deltas(rest: str, calls: list[ToolCall]) -> list[Delta]:
    """Text that was held back, then the calls, one at a time."""
    deltas = [Delta(content=rest)] if rest else []
    return deltas + [
        Delta(tool_calls=[ToolCallDelta(index=index, **call.model_dump())]) for index, call in enumerate(calls)
    ]
