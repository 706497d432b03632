"""Token ids to text, a token at a time: never half a character, never a second look at what is already text."""

from __future__ import annotations

from typing import Any


class Detokenizer:
    """Text of a growing answer. Special tokens are left out, as `tokenizer.decode(..., skip_special_tokens=True)` does.

    `text` is what is certain so far; bytes of an unfinished character are held back until it is whole or `finish`.
    Each step decodes only the tokens since the step before the last: how a token reads can depend on the one before it.
    (`tokenizers.DecodeStream` does the same, but raises where byte tokens that were text turn out to be none.)
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the last tokens whose text was given out
        self._held: list[int] = []
        self.text = ""

    def add(self, token_id: int) -> str:
        """The text that this token makes certain, often a word, sometimes nothing."""
        self._held.append(token_id)
        piece = self._decode_held()
        return "" if piece.endswith("\ufffd") else self._give_out(piece)

    def finish(self) -> str:
        """What was held back at the end: bytes that never became a character show as U+FFFD."""
        return self._give_out(self._decode_held())

    def _decode_held(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]

    def _give_out(self, piece: str) -> str:
        if piece:
            self._shown, self._held = self._held, []
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class StopMatcher:
    """Cuts text exactly where the first stop string begins, also when the string arrives in several pieces.

    `feed` returns what may be shown: everything that can no longer be the start of a stop string.
    """

    def __init__(self, stop: list[str]) -> None:
        self._stop = stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        if self.matched is not None or not self._stop:
            return "" if self.matched is not None else piece
        text = self._held + piece
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self._held = ""
            return text[:at]
        hold = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held
