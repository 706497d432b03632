"""JSON by construction: a schema's grammar as a logits processor, applied to every node of a draft on its own path."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import bad_request

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Small models otherwise write whitespace without end; an indentation of many levels still fits.
_COMPILE_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,16}"}


class GrammarCompiler:
    """Grammars over one tokenizer's vocabulary; the vocabulary is prepared once, at the first use.

    vocab_size: of the model's logits. eos_token_ids: allowed where the grammar may end, and only there.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._lock = threading.Lock()

    def processor(self, schema: dict[str, Any], num_prompt_tokens: int, param: str) -> GrammarProcessor:
        """One request's own. Raises ApiError 400, naming `param`, for a schema that has no grammar."""
        from llguidance import LLMatcher

        if not self._eos:
            raise bad_request(f"{param}: this model has no end-of-sequence token to end the JSON with", param)
        with self._lock:
            vocabulary = self._vocabulary
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPILE_OPTIONS)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{param}: no grammar for this schema: {error}", param) from error
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise bad_request(f"{param}: no grammar for this schema: {_first_line(matcher.get_error())}", param)
        return GrammarProcessor(matcher, num_prompt_tokens, self._vocab_size, self._eos)

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        size = max(self._vocab_size, len(self._tokenizer))
        return LLTokenizer(self._tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=self._eos[0])


class GrammarProcessor:
    """A Transformers logits processor. Nodes of a draft come in any order: the matcher goes back to where the node's
    path leaves the one before, and on from there."""

    def __init__(self, matcher: Any, num_prompt_tokens: int, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._matcher, self._num_prompt_tokens = matcher, num_prompt_tokens
        self._vocab_size, self._eos = vocab_size, eos_token_ids
        self._consumed: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [1, T], prompt and all. scores: float32 [1, V]; what the grammar excludes becomes -inf.

        Raises ValueError where the grammar passes a limit.
        """
        if not self._go_to(input_ids[0, self._num_prompt_tokens :].tolist()):
            return scores  # a drafted path that the grammar excludes: its parent has excluded it already
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))
        allowed[self._eos] = allowed[self._eos[0]].clone()
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def _go_to(self, output: list[int]) -> bool:
        if any(token in self._eos for token in output):
            return False
        same = 0
        while same < min(len(output), len(self._consumed)) and output[same] == self._consumed[same]:
            same += 1
        if len(self._consumed) > same:
            self._matcher.rollback(len(self._consumed) - same)
            del self._consumed[same:]
        new = output[same:]
        taken = self._matcher.try_consume_tokens(new) if new else 0
        self._check()
        self._consumed += new[:taken]
        return taken == len(new)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"response_format: the grammar gave up: {_first_line(self._matcher.get_error())}")


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]
