"""Conversations to token ids and loss masks, in this process or in several, in the order of the data either way.

The reading stays in this process: bad records and unreadable files come out where they are in the data, so the result
and its errors are those of one process, whatever the number of workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .chat_mask import ConversationEncoder, EncodedConversation, MaskError
from .chat_turns import Message
from .conversation import BadRecord, Conversation

CHUNK_SIZE = 256  # conversations tokenised at once
Record = tuple[int, Conversation | BadRecord]  # number of the source first
Encoded = list[EncodedConversation | MaskError]
Answer = list[tuple[np.ndarray, np.ndarray] | MaskError] | MaskError


@dataclass(frozen=True)
class TokenizedRecord:
    """`source`: its number. `result`: what to train on, or why the record cannot be used."""

    source: int
    category: str | None
    result: EncodedConversation | MaskError | BadRecord


def tokenize(
    records: Iterable[Record],
    tokenizer: Any,
    num_workers: int = 1,
    limit: int | None = None,
    console: Console | None = None,
) -> Iterator[TokenizedRecord]:
    """One for each record, in order. `limit`: how many the caller may want: little more than those are read.

    `console`: where to show progress, None for none. Raises what `records` raises, once those before are through;
    MaskError for a tokenizer that cannot mask at all; RuntimeError where a worker dies.
    """
    chunks = _chunks(records, min(CHUNK_SIZE, limit or CHUNK_SIZE))
    columns = [TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()]
    is_shown = console is not None and console.is_terminal
    encode = _encode_here(chunks, tokenizer) if num_workers == 1 else _encode_there(chunks, tokenizer, num_workers)
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress, closing(encode) as done:
        task = progress.add_task("Tokenising conversations", total=None)
        for chunk, results in done:
            yield from _merge(chunk, results, len(tokenizer))
            progress.advance(task, len(chunk.records))
            if chunk.failure:
                raise chunk.failure


# ---- chunks


@dataclass(frozen=True)
class _Chunk:
    """`failure`: what reading ended with behind these records."""

    records: list[Record]
    failure: ValueError | None = None

    @property
    def texts(self) -> list[list[Message]]:
        """What a chat template is needed for; records with exact ids need none."""
        return [r.messages for _, r in self.records if isinstance(r, Conversation) and r.answer_ids is None]


def _chunks(records: Iterable[Record], size: int) -> Iterator[_Chunk]:
    iterator = iter(records)
    while True:
        chunk: list[Record] = []
        try:
            for record in islice(iterator, size):
                chunk.append(record)
        except ValueError as error:
            yield _Chunk(chunk, error)
            return
        if not chunk:
            return
        yield _Chunk(chunk)


def _merge(chunk: _Chunk, encoded: Encoded, vocab_size: int) -> Iterator[TokenizedRecord]:
    of_text = iter(encoded)
    for source, record in chunk.records:
        if isinstance(record, BadRecord):
            yield TokenizedRecord(source, None, record)
            continue
        result = next(of_text) if record.answer_ids is None else _from_ids(record, vocab_size)
        if isinstance(result, MaskError):
            result = MaskError(result.reason, f"{record.where}: {result}")
        yield TokenizedRecord(source, record.category, result)


def _from_ids(conversation: Conversation, vocab_size: int) -> EncodedConversation | MaskError:
    """Exact ids, as they were generated: prompt, then answer with the token that ended it, if one did."""
    prompt_ids, answer_ids = conversation.prompt_ids, conversation.answer_ids
    assert prompt_ids is not None and answer_ids is not None
    largest = max(prompt_ids + answer_ids)
    if largest >= vocab_size:
        return MaskError(
            "ids of another tokenizer",
            f"got token id {largest}, expected ids below the tokenizer's {vocab_size}; use the base model that "
            "the data was made with",
        )
    input_ids = torch.tensor(prompt_ids + answer_ids, dtype=torch.int64)
    return EncodedConversation(input_ids, torch.arange(len(input_ids)) >= len(prompt_ids))


# ---- text, in this process or in several


def _encode_here(chunks: Iterable[_Chunk], tokenizer: Any) -> Generator[tuple[_Chunk, Encoded], None, None]:
    encoder: ConversationEncoder | None = None
    for chunk in chunks:
        texts = chunk.texts
        if texts and encoder is None:
            encoder = ConversationEncoder(tokenizer)
        yield chunk, encoder.encode_batch(texts) if encoder else []


def _encode_there(
    chunks: Iterable[_Chunk], tokenizer: Any, num_workers: int
) -> Generator[tuple[_Chunk, Encoded], None, None]:
    """Workers in turn, each with one chunk at a time, so that neither side of a pipe ever waits for the other to read.

    Started afresh (spawn): forking a process that runs threads of torch or of a GPU is not safe.
    """
    with ExitStack() as stack:
        idle: deque[Connection] = deque()
        busy: deque[tuple[_Chunk, Connection]] = deque()
        for chunk in chunks:
            if not idle and len(busy) < num_workers:  # no more than there is work for
                idle.append(_start(tokenizer, stack))
            if not idle:
                done, connection = busy.popleft()
                yield done, _receive(connection)
                idle.append(connection)
            busy.append((chunk, idle.popleft()))
            _send(busy[-1][1], chunk.texts)
        for done, connection in busy:
            yield done, _receive(connection)


def _start(tokenizer: Any, stack: ExitStack) -> Connection:
    """This side of a new worker's pipe; both end with `stack`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, tokenizer), daemon=True)
    worker.start()
    theirs.close()
    for end in (worker.join, worker.terminate, ours.close):  # called from the last to the first
        stack.callback(end)
    return ours


def _work(connection: Connection, tokenizer: Any) -> None:
    """A worker: answers each list of conversations until the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    encoder: ConversationEncoder | None = None
    while True:
        try:
            texts = connection.recv()
        except EOFError:
            return
        answer: Answer = []
        try:
            if texts:
                encoder = encoder or ConversationEncoder(tokenizer)
                # As arrays: tensors would pass through shared memory, with a file descriptor for each.
                answer = [_as_arrays(result) for result in encoder.encode_batch(texts)]
        except MaskError as error:  # of the tokenizer itself
            answer = error
        connection.send(answer)


def _as_arrays(result: EncodedConversation | MaskError) -> tuple[np.ndarray, np.ndarray] | MaskError:
    return result if isinstance(result, MaskError) else (result.input_ids.numpy(), result.loss_mask.numpy())


def _send(connection: Connection, texts: list[list[Message]]) -> None:
    try:
        connection.send(texts)
    except OSError as error:
        raise RuntimeError(_worker_died()) from error


def _receive(connection: Connection) -> Encoded:
    try:
        answer: Answer = connection.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError(_worker_died()) from error
    if isinstance(answer, MaskError):
        raise answer
    return [
        a if isinstance(a, MaskError) else EncodedConversation(torch.from_numpy(a[0]), torch.from_numpy(a[1]))
        for a in answer
    ]


def _worker_died() -> str:
    return (
        "a tokenising process died, most likely for lack of memory or because a script that calls train() has no "
        "`if __name__ == '__main__':`; set data.num_workers lower, or to 1"
    )
