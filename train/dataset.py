"""Conversations into examples: tokenised, masked, truncated, counted. And which tokens heads should know.

They are held in memory (9 bytes a token), or, with data.streaming, in a file read through a memory map (4 bytes a
token on disk, see token_store.py). Batches are batching.py's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from .batching import Example
from .chat_mask import EncodedConversation, MaskError
from .config import DataConfig, DataSource, as_sources
from .conversation import OnBadRecord, check_source, read_records
from .data_statistics import DataStatistics, SourceStatistics
from .token_store import StoreWriter, open_store
from .tokenization import tokenize

LABELS_AT_ONCE = 1024  # examples whose labels are counted together
POLL_S = 0.5
NO_LABELS = "no tokens under loss within max_length"


@dataclass(frozen=True)
class TokenizedDataset(Sequence[Example]):
    """Examples in the order of the data, bad ones left out. `lengths`: int64 [N], tokens of each. `fingerprint`: sha256
    (hex) of all token ids and loss masks."""

    examples: Sequence[Example]
    lengths: np.ndarray
    fingerprint: str
    statistics: DataStatistics

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        return self.examples[index]


def build_dataset(
    sources: str | Sequence[str | DataSource],
    tokenizer: Any,
    max_length: int,
    on_bad_record: OnBadRecord = "error",
    limit: int | None = None,
    console: Console | None = None,
    num_workers: int = 1,
) -> TokenizedDataset:
    """Reads, tokenises and masks conversations; `sources` as `read_conversations` takes them.

    Longer ones are cut on the right to `max_length` tokens; one that has no token under loss left is skipped and
    counted. `limit`: stop after so many examples. `console`: where to show progress, None for none.
    Raises ValueError for sources that cannot be read, bad records (unless skipped), and where nothing is left.
    """
    reading = _Reading(as_sources(sources), tokenizer, max_length, on_bad_record, limit, num_workers, streaming=False)
    examples: list[Example] = []
    statistics, fingerprint = reading.run(examples.append, console)
    return TokenizedDataset(examples, np.array([len(example) for example in examples]), fingerprint, statistics)


def load_data(
    config: DataConfig, tokenizer: Any, folder: Path, is_main_process: bool, console: Console | None
) -> TokenizedDataset:
    """The data of a training run. With `config.streaming` as a token store in `folder`, which the main process writes
    unless it is there already, of the same sources and settings; the others wait for it. Raises as `build_dataset`."""
    sources, skip, limit, workers = as_sources(config.path), config.on_bad_record, config.limit, config.num_workers
    if not config.streaming:
        return build_dataset(sources, tokenizer, config.max_length, skip, limit, console, workers)
    identity = _store_identity(config, tokenizer)
    store = open_store(folder, identity)
    if store is None and is_main_process:
        reading = _Reading(sources, tokenizer, config.max_length, skip, limit, workers, streaming=True)
        with StoreWriter(folder, console) as writer:
            statistics, fingerprint = reading.run(writer.append, console)
            writer.finish(identity, fingerprint, statistics)
        store = open_store(folder, identity)
        assert store is not None
    while store is None:  # no collective: tokenising may take longer than those wait
        time.sleep(POLL_S)
        store = open_store(folder, identity)
    return TokenizedDataset(store, store.lengths, store.fingerprint, store.statistics)


def _store_identity(config: DataConfig, tokenizer: Any) -> str:
    """What decides the tokens, as JSON: files by size and time, the tokenizer by its content."""
    sources = []
    for source in as_sources(config.path):
        path = check_source(source.path)
        state = path.stat() if path else None
        sources.append([*source.model_dump().values(), state and [state.st_size, state.st_mtime_ns]])
    is_fast = getattr(tokenizer, "is_fast", False)
    vocabulary = tokenizer.backend_tokenizer.to_str() if is_fast else repr(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    content = hashlib.sha256(json.dumps([vocabulary, template], sort_keys=True).encode()).hexdigest()
    return json.dumps([sources, content, config.max_length, config.on_bad_record, config.limit])


@dataclass(frozen=True)
class _Reading:
    """One pass over the sources; the fields are those of DataConfig."""

    sources: list[DataSource]
    tokenizer: Any
    max_length: int
    on_bad_record: OnBadRecord
    limit: int | None
    num_workers: int
    streaming: bool

    def run(self, keep: Callable[[Example], None], console: Console | None) -> tuple[DataStatistics, str]:
        """Calls `keep` with each example. Returns what was read, and its fingerprint."""
        if self.max_length < 2:
            raise ValueError(f"data.max_length is {self.max_length}, expected at least 2 tokens; set it to 512 or more")
        if self.on_bad_record not in ("error", "skip"):
            raise ValueError(f"data.on_bad_record is {self.on_bad_record!r}, expected 'error' or 'skip'")
        statistics = DataStatistics(sources=[SourceStatistics(s.path, s.weight) for s in self.sources])
        digest, first_error = hashlib.sha256(), None
        records = read_records([source.path for source in self.sources], self.streaming)
        for record in tokenize(records, self.tokenizer, self.num_workers, self.limit, console):
            if not isinstance(record.result, EncodedConversation):
                if self.on_bad_record == "error":
                    raise record.result
                if isinstance(record.result, MaskError):
                    first_error = first_error or record.result
                statistics.skipped[record.result.reason] += 1
            elif example := _truncate(record.result, self.max_length, record.category, statistics):
                statistics.sources[record.source].conversations += 1
                statistics.sources[record.source].tokens += len(example)
                _update(digest, example)
                keep(example)
            if self.limit is not None and statistics.conversations >= self.limit:
                break
        if not statistics.conversations:
            raise ValueError(_nothing_left(self.sources, statistics, first_error))
        return statistics, digest.hexdigest()


def _update(digest: Any, example: Example) -> None:
    digest.update(len(example).to_bytes(8, "little"))
    digest.update(example.input_ids.numpy().tobytes())
    digest.update(example.loss_mask.numpy().tobytes())


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


def _nothing_left(sources: list[DataSource], statistics: DataStatistics, first_error: MaskError | None) -> str:
    names = ", ".join(source.path for source in sources)
    reasons = ", ".join(f"{count} {reason}" for reason, count in statistics.skipped.most_common())
    example = f" (the first: {first_error})" if first_error else ""
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
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    labels = (example.input_ids[example.loss_mask] for example in examples)
    while chunk := list(islice(labels, LABELS_AT_ONCE)):
        new = torch.bincount(torch.cat(chunk), minlength=vocab_size)
        if len(new) > vocab_size:
            raise ValueError(
                f"got token id {len(new) - 1} in the data, expected ids below the base model's {vocab_size}; "
                "use the tokenizer of the base model"
            )
        counts += new
    return counts
