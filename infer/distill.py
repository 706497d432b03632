"""`medusa distill`: training data made by the base model itself.

Heads learn best from what the base really says, so the base answers prompts: given ones, or such as it writes itself
when it is handed the opening of a user turn. Answers are greedy and kept as exact token ids. Records are appended to
the output as they finish; after a kill, a second run drops the half-written last line and does only what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from medusa.base_model import BaseModel
from medusa.drafter import RootDrafter
from medusa.sampling import SamplingParams

from .generation import encode_prompt, run_requests
from .progress import token_progress
from .prompts import PromptRecord, read_prompts
from .request import Piece, Request

BLOCK = 256  # self-written prompts are drawn in blocks of at most this many, each from a seed of its own
MIN_PROMPT_CHARACTERS = 12


@dataclass(frozen=True)
class DistillOptions:
    """max_new_tokens: longest answer, in tokens. max_rows: sequences decoded together. temperature and top_p are
    those of self-written prompts; answers are greedy."""

    max_new_tokens: int = 256
    max_prompt_tokens: int = 96
    max_rows: int = 64
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 0.95


@dataclass
class DistillResult:
    """failures: reason by id of each prompt that a server did not answer; the base in this process answers all."""

    num_records: int
    num_answer_tokens: int
    num_resumed: int
    failures: dict[str, str] = field(default_factory=dict)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that a killed run may have left; cuts a half-written last line off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    try:
        records = [json.loads(line) for line in data[:whole].splitlines()]
        if data[whole:] and not b'{"id": '.startswith(data[whole:][:7]):
            raise ValueError("its last line is not the beginning of a record")
    except ValueError as error:
        raise ValueError(f"{path}: holds something else than this command's records ({error}); move it away") from error
    if whole != len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    return records


def user_opening(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to where the user's first words stand."""
    mark = "\u0001user\u0001"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    if mark not in text:
        raise ValueError(f"the chat template of {tokenizer.name_or_path!r} drops the user's words; give --prompts")
    return list(tokenizer(text[: text.index(mark)], add_special_tokens=False).input_ids)


def write_prompts(base: BaseModel, path: Path, count: int, options: DistillOptions, console: Console) -> None:
    """Let the base write `count` distinct user turns into `path`, one JSONL record each."""
    records = read_records(path)
    seen = {record["turns"][0] for record in records}
    block = 1 + max((record["block"] for record in records), default=-1)
    # A block may be half written: its records come out the same again, and `seen` leaves them out.
    block = max(0, block - 1)
    with (
        path.open("a", encoding="utf-8") as file,
        token_progress(console, "prompts", count, unit="prompts") as progress,
    ):
        progress.advance(len(seen))
        while len(seen) < count:
            for text in _draw_prompts(base, block, min(BLOCK, count), options):
                if text not in seen and len(seen) < count:
                    record = {"id": f"self-{len(seen)}", "block": block, "turns": [text]}
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    seen.add(text)
                    progress.advance(1)
            file.flush()
            block += 1


def _draw_prompts(base: BaseModel, block: int, size: int, options: DistillOptions) -> list[str]:
    opening = user_opening(base.tokenizer)
    first_seed = (options.seed * 1_000_003 + block) * BLOCK
    requests = [
        Request(
            opening,
            options.max_prompt_tokens,
            base.eos_token_ids,
            base.tokenizer,
            sampling=SamplingParams(options.temperature, top_p=options.top_p, seed=first_seed + i),
        )
        for i in range(size)
    ]
    for _ in run_requests(base, RootDrafter(), requests, max_rows=options.max_rows):
        pass
    texts = [request.text.strip() for request in requests if request.finish_reason == "stop"]
    return [text for text in texts if len(text) >= MIN_PROMPT_CHARACTERS]


def answer_prompts(
    base: BaseModel, prompts: Iterable[PromptRecord], options: DistillOptions
) -> Iterator[tuple[PromptRecord, Request, Piece]]:
    """Greedy answers to the first turns, piece by piece; a request with a `finish_reason` is complete."""
    requests, records = [], {}
    for prompt in prompts:
        ids = encode_prompt(base.tokenizer, prompt.turns[0])
        request = Request(ids, options.max_new_tokens, base.eos_token_ids, base.tokenizer)
        requests.append(request)
        records[id(request)] = prompt
    for request, piece in run_requests(base, RootDrafter(), requests, max_rows=options.max_rows):
        yield records[id(request)], request, piece


def distill(
    base: BaseModel,
    out: Path,
    *,
    prompts: Path | None = None,
    self_prompt: int | None = None,
    options: DistillOptions,
    console: Console,
) -> DistillResult:
    """Write one record a prompt to `out` (JSONL): id, category, messages, prompt_ids, answer_ids, finish_reason.

    Exactly one of `prompts` (a JSONL file) and `self_prompt` (how many to write) is given. Raises ValueError for bad
    input, before anything is computed.
    """
    if (prompts is None) == (self_prompt is None):
        raise ValueError("distill: give exactly one of --prompts FILE and --self-prompt N")
    out.parent.mkdir(parents=True, exist_ok=True)
    if prompts is None:
        assert self_prompt is not None
        prompts = out.with_name(out.name + ".prompts")
        write_prompts(base, prompts, self_prompt, options, console)
    done = read_records(out)
    finished = {record["id"] for record in done}
    todo = [prompt for prompt in read_prompts(prompts) if prompt.id not in finished]
    num_tokens = sum(len(record["answer_ids"]) for record in done)
    with out.open("a", encoding="utf-8") as file, token_progress(console, "answers", len(todo), "prompts") as progress:
        for prompt, request, piece in answer_prompts(base, todo, options):
            if request.finish_reason:
                file.write(json.dumps(_record(prompt, request), ensure_ascii=False) + "\n")
                file.flush()
                num_tokens += len(request.token_ids)
            progress.advance(int(request.finish_reason is not None), tokens=len(piece.token_ids))
    return DistillResult(len(done) + len(todo), num_tokens, len(done))


def _record(prompt: PromptRecord, request: Request) -> dict[str, Any]:
    answer = {"role": "assistant", "content": request.text}
    return {
        "id": prompt.id,
        **({"category": prompt.category} if prompt.category else {}),
        "messages": [{"role": "user", "content": prompt.turns[0]}, answer],
        "prompt_ids": request.prompt_ids,
        "answer_ids": request.token_ids,
        "finish_reason": request.finish_reason,
    }
