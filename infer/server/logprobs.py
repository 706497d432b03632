"""Logprobs as the two endpoints show them; all under the base's own distribution, before temperature and penalties."""

from __future__ import annotations

from collections.abc import Sequence

from ..logprobs import TokenLogprob
from .responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from .text_codec import TextCodec

LOWEST = -9999.0  # JSON has no minus infinity; OpenAI's number for it


def chat_logprobs(codec: TextCodec, tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_token(codec, token) for token in tokens])


def _chat_token(codec: TextCodec, token: TokenLogprob) -> ChatTokenLogprob:
    top = [_top(codec, token_id, logprob) for token_id, logprob in token.top]
    return ChatTokenLogprob(**_top(codec, token.token_id, token.logprob).model_dump(), top_logprobs=top)


def _top(codec: TextCodec, token_id: int, logprob: float) -> TopLogprob:
    raw = list(codec.token_bytes(token_id))
    return TopLogprob(token=codec.token_text(token_id), logprob=max(logprob, LOWEST), bytes=raw)


class CompletionLogprobsWriter:
    """Of one choice; `text_offset` counts on from chunk to chunk."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec, self._offset = codec, 0

    def write(self, tokens: Sequence[TokenLogprob | None], token_ids: Sequence[int]) -> CompletionLogprobs:
        """tokens: aligned with token_ids; None for the first of a prompt, which nothing predicts."""
        result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, token_id in zip(tokens, token_ids, strict=True):
            result.text_offset.append(self._offset)
            result.tokens.append(self._name(token_id))
            result.token_logprobs.append(None if token is None else max(token.logprob, LOWEST))
            result.top_logprobs.append(None if token is None else self._top(token))
            self._offset += len(self._codec.token_text(token_id))
        return result

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        likely = [*reversed(token.top), (token.token_id, token.logprob)]
        return {self._name(token_id): max(logprob, LOWEST) for token_id, logprob in likely}

    def _name(self, token_id: int) -> str:
        """Its text; parts of characters, which would all read alike, as OpenAI writes them: `bytes:\\xf0\\x9f`."""
        text = self._codec.token_text(token_id)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._codec.token_bytes(token_id))


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        text_offset=[offset for part in parts for offset in part.text_offset],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        tokens=[token for part in parts for token in part.tokens],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
    )
