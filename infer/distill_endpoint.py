"""`medusa distill --endpoint URL`: the same data from any server that speaks OpenAI's protocol, many requests at once.

For a base that is served already, on more hardware than this machine has. Text only: a server gives no token ids, so
training tokenises its answers anew. Records are appended as they arrive; a second run asks only what is missing. What
a server refused, or did not answer after all retries, is listed with its reason and never becomes a record.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from .distill import DistillResult, read_records
from .progress import TokenProgress, token_progress
from .prompts import PromptRecord, read_prompts


@dataclass(frozen=True)
class Endpoint:
    """A server, and how it is asked. The key is read from OPENAI_API_KEY, where it wants one.

    url: up to and with `/v1`. model: as the server calls it; None: the only one there. concurrency: requests at once.
    max_retries: of one request, with exponential back-off, after a lost connection, a time-out, 408, 409, 429 or 5xx.
    timeout_s: seconds that one try may take.
    """

    url: str
    model: str | None = None
    concurrency: int = 16
    max_retries: int = 5
    timeout_s: float = 600.0


def distill_endpoint(
    endpoint: Endpoint, out: Path, prompts: Path, max_new_tokens: int, console: Console
) -> DistillResult:
    """Write one record a prompt to `out` (JSONL): id, category, messages, num_tokens, finish_reason; greedy answers.
    Prompts without an answer are in the result's `failures`, and in `<out>.failed`.

    Raises ValueError for bad input and for a server that cannot be reached or does not serve the model.
    """
    questions = read_prompts(prompts)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = read_records(out)
    finished = {record["id"] for record in done}
    todo = [question for question in questions if question.id not in finished]
    result = DistillResult(len(done), sum(record.get("num_tokens", 0) for record in done), len(done))
    if todo:
        with out.open("a", encoding="utf-8") as file, token_progress(console, "answers", len(todo), "prompts") as bar:
            asyncio.run(_ask_all(endpoint, todo, max_new_tokens, file, bar, result))
    _write_failures(out.with_name(out.name + ".failed"), result.failures)
    return result


async def _ask_all(
    endpoint: Endpoint,
    todo: list[PromptRecord],
    max_new_tokens: int,
    file: IO[str],
    bar: TokenProgress,
    result: DistillResult,
) -> None:
    client = _client(endpoint)
    async with client:
        model = await _model_name(client, endpoint)
        waiting = iter(todo)

        async def work() -> None:
            for prompt in waiting:  # shared: each worker takes the next
                record = await _ask(client, model, prompt, max_new_tokens)
                if isinstance(record, str):
                    result.failures[prompt.id] = record
                    bar.advance(1)
                    continue
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                result.num_records += 1
                result.num_answer_tokens += record["num_tokens"]
                bar.advance(1, tokens=record["num_tokens"])

        await asyncio.gather(*(work() for _ in range(min(endpoint.concurrency, len(todo)))))


async def _ask(client: Any, model: str, prompt: PromptRecord, max_new_tokens: int) -> dict[str, Any] | str:
    """The record, or why there is none."""
    import openai

    question = {"role": "user", "content": prompt.turns[0]}
    try:
        answer = await client.chat.completions.create(
            model=model, messages=[question], max_tokens=max_new_tokens, temperature=0.0
        )
    except openai.OpenAIError as error:
        return _one_line(error)
    choice = answer.choices[0] if answer.choices else None
    if choice is None or not choice.message.content:
        return "the server answered with no text"
    return {
        "id": prompt.id,
        **({"category": prompt.category} if prompt.category else {}),
        "messages": [question, {"role": "assistant", "content": choice.message.content}],
        "num_tokens": answer.usage.completion_tokens if answer.usage else 0,
        "finish_reason": choice.finish_reason,
    }


def _client(endpoint: Endpoint) -> Any:
    try:
        import openai
    except ImportError as error:
        raise ValueError("--endpoint needs the openai package: pip install 'medusa-decoding[train]'") from error
    key = os.environ.get("OPENAI_API_KEY") or "none"
    return openai.AsyncOpenAI(
        base_url=endpoint.url, api_key=key, max_retries=endpoint.max_retries, timeout=endpoint.timeout_s
    )


async def _model_name(client: Any, endpoint: Endpoint) -> str:
    import openai

    try:
        served = [model.id async for model in client.models.list()]
    except openai.OpenAIError as error:
        raise ValueError(
            f"endpoint {endpoint.url!r}: got no list of models ({_one_line(error)}), expected a server with OpenAI's "
            "protocol there; the URL usually ends in /v1"
        ) from error
    if endpoint.model is None and len(served) == 1:
        return str(served[0])
    if endpoint.model not in served:
        got = "no --model" if endpoint.model is None else f"--model {endpoint.model!r}"
        raise ValueError(f"endpoint {endpoint.url!r}: got {got}, expected one of {', '.join(served) or 'none served'}")
    return str(endpoint.model)


def _one_line(error: Exception) -> str:
    return " ".join(f"{error} {error.__cause__ or ''}".split())[:300]


def _write_failures(path: Path, failures: dict[str, str]) -> None:
    path.unlink(missing_ok=True)
    if failures:
        lines = [json.dumps({"id": name, "error": reason}, ensure_ascii=False) for name, reason in failures.items()]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
