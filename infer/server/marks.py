"""Which text of an answer had been drafted, and which the base had to produce itself."""

from __future__ import annotations

from collections import deque

from ..detokenize import Detokenizer
from ..request import Piece
from .responses import Mark, MedusaMarks


class Marker:
    """Follows one answer. Text comes later than its tokens (half a character, or the beginning of a stop string, is
    held back), so tokens' own texts are queued here and taken off as the answer's text comes."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._texts: deque[tuple[str, bool]] = deque()
        self._drafted = False

    def mark(self, piece: Piece) -> MedusaMarks:
        for place, token in enumerate(piece.token_ids):
            self._drafted = place < piece.num_drafted_accepted
            self._texts.append((self._detokenizer.add(token), self._drafted))
        marks = self._take(len(piece.text))
        return MedusaMarks(
            num_tokens=len(piece.token_ids), num_drafted_accepted=piece.num_drafted_accepted, marks=marks
        )

    def _take(self, length: int) -> list[Mark]:
        marks: list[Mark] = []
        while length > 0:
            if self._texts:
                text, drafted = self._texts.popleft()
            else:  # at the end come bytes that never became a character; they are the last token's
                text, drafted = self._detokenizer.finish(), self._drafted
                assert text, "an answer's text is that of its tokens"
            if len(text) > length:
                self._texts.appendleft((text[length:], drafted))
                text = text[:length]
            length -= len(text)
            if marks and marks[-1].drafted == drafted:
                marks[-1] = Mark(text=marks[-1].text + text, drafted=drafted)
            elif text:
                marks.append(Mark(text=text, drafted=drafted))
        return marks
