"""Where the last tokens of a text stood before, and what followed (prompt lookup decoding, Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIN_MATCH, INDEXED_MATCH, MAX_MATCH = 2, 4, 16  # tokens


@dataclass(frozen=True)
class Match:
    """The text's end also stood before `position`; `length` of its tokens agree, `MAX_MATCH` at most."""

    position: int
    length: int


class NgramIndex:
    """Grows with its text; finding and growing cost the same whatever its length.

    Runs of `MIN_MATCH` to `INDEXED_MATCH` tokens are looked up, the longest first and of equal ones the most recent.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # a run -> the place after its last occurrence that has one

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for length in range(MIN_MATCH, min(INDEXED_MATCH, end) + 1):
                self._after[tuple(self.tokens[end - length :])] = end
            self.tokens.append(token)

    def find(self, root: int) -> Match | None:
        """Where the text and `root` behind it end alike before."""
        recent = (*self.tokens[-INDEXED_MATCH + 1 :], root)
        for length in range(len(recent), MIN_MATCH - 1, -1):
            position = self._after.get(recent[-length:])
            if position is not None:
                return Match(position, self._match_length(position, length, root))
        return None

    def follow(self, match: Match, root: int, count: int) -> list[int]:
        """`count` tokens from the match on. Where they reach the text's end they go on with themselves, so that a text
        that repeats with a short period is continued."""
        text = self.tokens[match.position :] + [root]
        while len(text) < count:
            text += text[: count - len(text)]
        return text[:count]

    def _match_length(self, position: int, length: int, root: int) -> int:
        """How many tokens before `position` are those before the text's end, `root` being the last of them."""
        text, end = self.tokens, len(self.tokens)
        limit = min(MAX_MATCH, position)
        while length < limit and text[position - 1 - length] == text[end - length]:
            length += 1
        return length
