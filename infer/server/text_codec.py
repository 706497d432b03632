"""Text to ids and back for the server's own thread, and how a single token reads."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from ..detokenize import Detokenizer
from .errors import bad_request
from .schema import Message, Tool

_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextCodec:
    """A tokenizer of its own: a fast tokenizer that two threads change at once raises "Already borrowed".

    `vocab_size`: of the model, so that ids beyond it are refused.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = copy.deepcopy(tokenizer), vocab_size
        self._lock = threading.Lock()

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return "tools" in self.template

    @property
    def template(self) -> str:
        """The chat template, "" where there is none."""
        template = getattr(self.tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "".join(template.values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError 400 for an id that the model does not have."""
        if ids and max(ids) >= self.vocab_size:
            raise bad_request(f"{param}: got token id {max(ids)}, expected ids below {self.vocab_size}", param)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the chat as the model's own template writes it. Raises ApiError 400 for what the template refuses."""
        if not self.template:
            raise bad_request("messages: this model has no chat template; use /v1/completions", "messages")
        if tools and not self.takes_tools:
            raise bad_request("tools: this model's chat template does not take tools", "tools")
        extra = template_kwargs or {}
        if reserved := sorted(set(extra) & _RESERVED):
            raise bad_request(f"chat_template_kwargs: {reserved[0]} cannot be set", "chat_template_kwargs")
        try:
            with self._lock:
                text = self.tokenizer.apply_chat_template(
                    [_as_template_message(message) for message in messages],
                    tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **extra,
                )
        except _TEMPLATE_FAILURES as error:
            # Templates check the order of roles and the like, and say so by raising.
            raise bad_request(f"messages: the model's chat template refuses them: {error}", "messages") from error
        return self.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Exact where the token is part of a character, as byte-level and byte-fallback vocabularies have them."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text.encode()
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if match := _BYTE_TOKEN.fullmatch(token or ""):
            return bytes([int(match[1], 16)])
        if token and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        return text.encode()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The printable stand-ins for bytes of byte-level vocabularies: bytes that print stand for themselves, the
        others for the characters from 256 on, in order."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


def _as_template_message(message: Message) -> dict[str, Any]:
    """Templates want plain text, and arguments as objects."""
    result: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    result["content"] = _plain_text(message)
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [_as_template_call(call.model_dump()) for call in message.tool_calls]
    return result


def _plain_text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise bad_request(f"messages: got a content part of type {part.type!r}, expected text", "messages")
    return "".join(part.text or "" for part in message.content)


def _as_template_call(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError) as error:
        raise bad_request("messages: the arguments of a tool call are not JSON", "messages") from error
    return call | {"function": {"name": call["function"]["name"], "arguments": arguments}}
