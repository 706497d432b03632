"""Which tokens of a conversation the assistant wrote: its answers and the tokens that end its turns.

The token that ends a turn is the first eos or other special token that the template writes behind the answer, for
this turn. What it puts around it, such as a newline, is not under loss. A template that ends turns without such a
token: answers only. Where an answer's edge falls inside a token, the text is tokenised in pieces cut at the edges, as
in inference, where the prompt is tokenised on its own and the answer grows behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from .chat_turns import ChatRenderer, MaskError, Message, Rendering, Turn, tokenizer_name


@dataclass(frozen=True)
class EncodedConversation:
    """input_ids: int64 [T]. loss_mask: bool [T]."""

    input_ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class _Tokens:
    """ids: int64 [T]. starts, ends: int64 [T], each token's characters in the text."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def encode_conversation(tokenizer: Any, messages: Sequence[Message]) -> tuple[Tensor, Tensor]:
    """(input_ids int64 [T], loss_mask bool [T]) of one conversation. Raises MaskError (a ValueError).

    For many conversations make one ConversationEncoder and give it batches: it is some hundred times faster.
    """
    [encoded] = ConversationEncoder(tokenizer).encode_batch([messages])
    if isinstance(encoded, MaskError):
        raise encoded
    return encoded.input_ids, encoded.loss_mask


class ConversationEncoder:
    """Renders, tokenises and masks with one tokenizer. Raises MaskError where it has no chat template or offsets."""

    def __init__(self, tokenizer: Any) -> None:
        self.name = tokenizer_name(tokenizer)
        if not getattr(tokenizer, "is_fast", False):
            raise MaskError(
                "no offsets",
                f"tokenizer {self.name}: got a {type(tokenizer).__name__} without character offsets, expected a fast "
                "tokenizer (tokenizer.json); or give records with prompt_ids and answer_ids",
            )
        special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self.special_ids = np.array(sorted(special), dtype=np.int64)
        self.renderer = ChatRenderer(tokenizer, list(special.values()))
        # A copy that, unlike some tokenizers' post-processors, adds no tokens and trims no spaces off the offsets.
        self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode_batch(self, batch: Sequence[Sequence[Message]]) -> list[EncodedConversation | MaskError]:
        """A result for each conversation, in order. Errors are among them, so that a caller may skip or raise."""
        results: list[EncodedConversation | MaskError | Rendering] = [self._render(messages) for messages in batch]
        rendered = [(i, result) for i, result in enumerate(results) if isinstance(result, Rendering)]
        encodings = self.backend.encode_batch([rendering.text for _, rendering in rendered], add_special_tokens=False)
        for (i, rendering), encoding in zip(rendered, encodings, strict=True):
            try:
                results[i] = self._mask(rendering, encoding)
            except MaskError as error:
                results[i] = error
        return [result for result in results if not isinstance(result, Rendering)]

    def _render(self, messages: Sequence[Message]) -> Rendering | MaskError:
        try:
            return self.renderer.render(list(messages))
        except MaskError as error:
            return error

    def _mask(self, rendering: Rendering, encoding: Any) -> EncodedConversation:
        tokens = _tokens([encoding])
        edges = np.array([edge for turn in rendering.turns for edge in (turn.start, turn.end)], dtype=np.int64)
        if ((tokens.starts[:, None] < edges) & (edges < tokens.ends[:, None])).any():
            tokens = self._encode_pieces(rendering.text, edges.tolist(), encoding)
        special = np.isin(tokens.ids, self.special_ids)
        mask = np.zeros(len(tokens.ids), dtype=bool)
        for turn in rendering.turns:
            answer = (tokens.ends > turn.start) & (tokens.starts < turn.end)
            if self.renderer.marks_answers and (ending := self._ending_inside(turn, rendering.text, tokens, special)):
                mask |= answer & (tokens.ends <= ending)
                continue
            mask |= answer
            behind = np.flatnonzero(special & (tokens.starts >= turn.end) & (tokens.ends <= turn.tail))
            if len(behind):
                mask[behind[0]] = True
            elif turn.end_is_open:
                raise self.renderer.unmaskable("how it ends an answer depends on what follows")
        return EncodedConversation(torch.from_numpy(tokens.ids), torch.from_numpy(mask))

    def _ending_inside(self, turn: Turn, text: str, tokens: _Tokens, special: np.ndarray) -> int | None:
        """Generation blocks may hold the end token, and a newline behind it: the character where the token ends."""
        inside = np.flatnonzero(special & (tokens.starts >= turn.start) & (tokens.ends <= turn.end))
        if len(inside) and not text[tokens.ends[inside[-1]] : turn.end].strip():
            return int(tokens.ends[inside[-1]])
        return None

    def _encode_pieces(self, text: str, edges: list[int], whole: Any) -> _Tokens:
        cuts = [0, *edges, len(text)]
        pieces = [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
        encodings = self.backend.encode_batch(pieces, add_special_tokens=False)
        tokens = _tokens(encodings, cuts)
        # Some tokenizers put a space before every text they are given; in pieces that would change the conversation.
        decode = self.backend.decode
        if decode(tokens.ids.tolist(), skip_special_tokens=False) != decode(whole.ids, skip_special_tokens=False):
            raise MaskError(
                "answer's edge inside a token",
                f"got an answer whose first or last characters share a token of {self.name} with the template, "
                "expected edges between tokens; remove spaces or newlines at the answer's ends",
            )
        return tokens


def _tokens(encodings: Sequence[Any], text_starts: Sequence[int] = (0,)) -> _Tokens:
    """Encodings of consecutive texts, the i-th starting at character text_starts[i], as one."""
    ids = np.array([i for encoding in encodings for i in encoding.ids], dtype=np.int64)
    offsets = [
        (start + shift, end + shift)
        for encoding, shift in zip(encodings, text_starts, strict=False)
        for start, end in encoding.offsets
    ]
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    return _Tokens(ids, starts, ends)
