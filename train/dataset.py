"""Conversations into examples: tokenised, masked, truncated, counted. And which tokens heads should know.

The whole set is held in memory as token ids (9 bytes a token). Batches are batching.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from .batching import Example
from .chat_mask import ConversationEncoder, EncodedConversation, MaskError
from .conversation import Conversation, OnBadRecord, read_conversations
from .data_statistics import DataStatistics

CONVERSATIONS_AT_ONCE = 256
NO_LABELS = "no tokens under loss within max_length"


@dataclass(frozen=True)
class TokenizedDataset(Sequence[Example]):
    """Examples in the order of the data, bad ones left out."""

    examples: list[Example]
    statistics: DataStatistics

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        return self.examples[index]

    @property
    def lengths(self) -> list[int]:
        return [len(example) for example in self.examples]


def build_dataset(
    sources: str | Sequence[str],
    tokenizer: Any,
    max_length: int,
    on_bad_record: OnBadRecord = "error",
    limit: int | None = None,
    console: Console | None = None,
) -> TokenizedDataset:
    """Reads, tokenises and masks conversations; `sources` as `read_conversations` takes them.

    Longer ones are cut on the right to `max_length` tokens; one that has no token under loss left is skipped and
    counted. `limit`: stop after so many examples. `console`: where to show progress, None for none.
    Raises ValueError for sources that cannot be read, bad records (unless skipped), and where nothing is left.
    """
    if max_length < 2:
        raise ValueError(f"data.max_length is {max_length}, expected at least 2 tokens; set it to 512 or more")
    statistics = DataStatistics()
    first_error: list[ValueError] = []
    examples: list[Example] = []
    conversations = read_conversations(sources, on_bad_record, statistics.skipped)
    for conversation, encoded in _encode_all(conversations, tokenizer, console):
        if isinstance(encoded, MaskError):
            if on_bad_record == "error":
                raise encoded
            first_error = first_error or [encoded]
            statistics.skipped[encoded.reason] += 1
        elif example := _truncate(encoded, max_length, conversation.category, statistics):
            examples.append(example)
        if limit is not None and len(examples) >= limit:
            break
    if not examples:
        raise ValueError(_nothing_left(sources, statistics, first_error))
    return TokenizedDataset(examples, statistics)


def _encode_all(
    conversations: Iterable[Conversation], tokenizer: Any, console: Console | None
) -> Iterator[tuple[Conversation, EncodedConversation | MaskError]]:
    encoder: ConversationEncoder | None = None  # records with exact ids need no chat template
    columns = [TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()]
    is_shown = console is not None and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("Tokenising conversations", total=None)
        conversations = iter(conversations)
        while chunk := list(islice(conversations, CONVERSATIONS_AT_ONCE)):
            with_text = [conversation for conversation in chunk if conversation.answer_ids is None]
            if with_text and encoder is None:
                encoder = ConversationEncoder(tokenizer)
            encoded = iter(encoder.encode_batch([c.messages for c in with_text]) if encoder else [])
            for conversation in chunk:
                exact = conversation.answer_ids is not None
                result = _from_ids(conversation, len(tokenizer)) if exact else next(encoded)
                yield conversation, _located(result, conversation.where)
            progress.advance(task, len(chunk))


def _located(result: EncodedConversation | MaskError, where: str) -> EncodedConversation | MaskError:
    return MaskError(result.reason, f"{where}: {result}") if isinstance(result, MaskError) else result


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


def _truncate(
    encoded: EncodedConversation, max_length: int, category: str | None, statistics: DataStatistics
) -> Example | None:
    input_ids, loss_mask = encoded.input_ids[:max_length], encoded.loss_mask[:max_length]
    num_labels = int(loss_mask.sum())
    if num_labels == 0:
        statistics.skipped[NO_LABELS] += 1
        return None
    cut = len(encoded.input_ids) - len(input_ids)
    statistics.conversations += 1
    statistics.tokens += len(input_ids)
    statistics.loss_tokens += num_labels
    statistics.longest = max(statistics.longest, len(input_ids))
    statistics.truncated += cut > 0
    statistics.truncated_tokens += cut
    # Clones, so that what was cut off is not kept in memory.
    return Example(input_ids.clone(), loss_mask.clone(), category) if cut else Example(input_ids, loss_mask, category)


def _nothing_left(sources: str | Sequence[str], statistics: DataStatistics, first_error: list[ValueError]) -> str:
    names = sources if isinstance(sources, str) else ", ".join(sources)
    reasons = ", ".join(f"{count} {reason}" for reason, count in statistics.skipped.most_common())
    example = f" (the first: {first_error[0]})" if first_error else ""
    return f"{names}: got no usable conversation, skipped {reasons}{example}, expected at least one; fix the data"


# ---- tokens that heads should know


def frequent_tokens(examples: Iterable[Example], size: int, vocab_size: int, required: Sequence[int] = ()) -> Tensor:
    """Ids of the `size` tokens most frequent under loss: int64 [size], ascending. Ties go to the lower id.

    `required` ids (those that end an answer, say) are always among them; unseen tokens fill up, lowest ids first.
    """
    if not max(len(set(required)), 1) <= size <= vocab_size:
        raise ValueError(
            f"draft vocabulary of {size} tokens, expected {max(len(set(required)), 1)} to the base model's {vocab_size}"
            "; set heads.draft_vocab_size, or null for all tokens"
        )
    counts = _label_counts(examples, vocab_size)
    counts[list(required)] = torch.iinfo(torch.int64).max
    return torch.sort(counts, descending=True, stable=True).indices[:size].sort().values


def token_coverage(examples: Iterable[Example], token_ids: Tensor) -> float:
    """Share of the tokens under loss that are among `token_ids`, 0 to 1."""
    kept = total = 0
    for example in examples:
        labels = example.input_ids[example.loss_mask]
        kept += int(torch.isin(labels, token_ids).sum())
        total += len(labels)
    return kept / max(total, 1)


def _label_counts(examples: Iterable[Example], vocab_size: int) -> Tensor:
    """int64 [V]: how often each token is under loss."""
    labels = [example.input_ids[example.loss_mask] for example in examples]
    counts = torch.bincount(torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int64), minlength=vocab_size)
    if len(counts) > vocab_size:
        raise ValueError(
            f"got token id {len(counts) - 1} in the data, expected ids below the base model's {vocab_size}; "
            "use the tokenizer of the base model"
        )
    return counts
