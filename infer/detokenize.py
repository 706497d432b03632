"""Token ids to text, a token at a time: never half a character, never a second look at what is already text."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Text of a growing answer. Special tokens are left out, as `tokenizer.decode(..., skip_special_tokens=True)` does.

    `text` is what is certain so far; bytes of an unfinished character are held back until it is whole or `finish`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "_tokenizer", None)  # slow, pure Python tokenizers have none
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self.text = ""

    def add(self, token_id: int) -> str:
        """The text that this token makes certain, often a word, sometimes nothing."""
        self._ids.append(token_id)
        if self._fast is None:
            return self._extend(self._decode().rstrip("�"))
        piece = self._stream.step(self._fast, token_id) or ""
        self.text += piece
        return piece

    def finish(self) -> str:
        """What was held back at the end: bytes that never became a character show as U+FFFD."""
        return self._extend(self._decode())

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _extend(self, text: str) -> str:
        if not text.startswith(self.text):  # a decoder that rewrites its past; keep what was shown
            return ""
        piece, self.text = text[len(self.text) :], text
        return piece


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
