"""What both kinds of completion need to put an answer together."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from ..logprobs import TokenLogprob
from ..request import Piece
from ..service import Finished
from .context import ServerContext
from .marks import Marker
from .prepare import Job
from .responses import Mark, MedusaMarks, Usage
from .statistics import response_metrics
from .streams import Running


@dataclass
class Answer:
    """One choice, put together from its pieces. marker: where the client asked for marks."""

    marker: Marker | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_drafted_accepted: int = 0
    marks: list[Mark] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, event: Piece | Finished) -> MedusaMarks | None:
        """Returns the piece's own marks."""
        if isinstance(event, Finished):
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
            return None
        self.text += event.text
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or []
        self.num_drafted_accepted += event.num_drafted_accepted
        marks = self.marker.mark(event) if self.marker else None
        self.marks += marks.marks if marks else []
        return marks

    def all_marks(self) -> MedusaMarks | None:
        if self.marker is None:
            return None
        return MedusaMarks(
            num_tokens=len(self.token_ids), num_drafted_accepted=self.num_drafted_accepted, marks=self.marks
        )


def new_answers(context: ServerContext, job: Job) -> list[Answer]:
    marked = job.options.marks
    return [Answer(Marker(context.codec.detokenizer()) if marked else None) for _ in job.requests]


async def collect(running: Running, answers: list[Answer]) -> None:
    """Fill them to their ends. Raises ApiError where one fails."""
    async for index, event in running.events():
        answers[index].add(event)


@dataclass(frozen=True)
class Head:
    """Id, time and model of a response and of its chunks."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, context: ServerContext, prefix: str, kind: str) -> Head:
        return cls(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), context.model_id)

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


def usage_of(job: Job, num_completion_tokens: int) -> Usage:
    """Each prompt counts once, however many choices it has."""
    num_prompt_tokens = sum(map(len, job.prompts))
    cached = sum(request.num_cached_tokens for request in job.requests[:: job.n])
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details={"cached_tokens": cached},
    )


def last_chunk_fields(job: Job, num_completion_tokens: int) -> dict[str, Any] | None:
    """Usage and statistics of a stream's last chunk, which has no choices; None where nobody asked for it."""
    options = job.body.stream_options
    asked_usage = bool(options and options.include_usage)
    if not asked_usage and not job.options.statistics:
        return None
    return {"usage": usage_of(job, num_completion_tokens)} | metrics_fields(job)


def metrics_fields(job: Job) -> dict[str, Any]:
    return {"metrics": response_metrics(job.requests)} if job.options.statistics else {}


def usage_so_far(job: Job, answers: list[Answer]) -> dict[str, Any]:
    """On every chunk, where the client asked for `continuous_usage_stats`."""
    options = job.body.stream_options
    if not (options and options.include_usage and options.continuous_usage_stats):
        return {}
    return {"usage": usage_of(job, count_tokens(answers))}


def count_tokens(answers: list[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)
