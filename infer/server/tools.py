"""Tool calls in the text of an answer: the common formats, whole or as a stream.

Special tokens are not part of an answer's text, so a marker that is one (Mistral's, Llama 3's) may be missing there;
such an answer is told by its first character instead.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from .responses import CalledFunction, ToolCall
from .text_codec import TextCodec

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolFormat:
    """marker: what a call begins with. opening: an answer whose first character is one of these may be a call, too.
    read: (text from the marker on) -> (name, arguments) of each call; raises ValueError where there is none."""

    name: str
    marker: str
    opening: str
    read: Callable[[str], list[tuple[Any, Any]]]

    def start(self, text: str) -> int:
        """Index from which `text` is a call, or may turn out to be one; its length where nothing is."""
        stripped = text.lstrip()
        if self.opening and (not stripped or stripped[0] in self.opening):
            return 0
        at = text.find(self.marker)
        if at >= 0:
            return at
        held = (n for n in range(len(self.marker) - 1, 0, -1) if text.endswith(self.marker[:n]))
        return len(text) - next(held, 0)

    def parse(self, text: str, names: Collection[str]) -> list[ToolCall] | None:
        """The calls in `text`, which begins where `start` says. None where it is no call of the tools `names`."""
        try:
            calls = self.read(text.strip())
        except (ValueError, RecursionError):
            return None
        if not calls or not all(name in names and isinstance(arguments, dict) for name, arguments in calls):
            return None
        return [make_call(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]


def make_call(name: str, arguments: str) -> ToolCall:
    # Nine letters and digits: what Mistral's templates insist on when the call comes back.
    return ToolCall(id=uuid.uuid4().hex[:9], function=CalledFunction(name=name, arguments=arguments))


def _name_and_arguments(call: Any) -> tuple[Any, Any]:
    if not isinstance(call, dict):
        raise ValueError("a call is an object")
    return call.get("name"), call.get("arguments", call.get("parameters", {}))


def _read_hermes(text: str) -> list[tuple[Any, Any]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after another."""
    bodies = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, flags=re.DOTALL)
    return [_name_and_arguments(json.loads(body)) for body in bodies]


def _read_llama3(text: str) -> list[tuple[Any, Any]]:
    """`{"name": ..., "parameters": {...}}`, several divided by semicolons."""
    return [_name_and_arguments(call) for call in _objects(text.removeprefix("<|python_tag|>"))]


def _read_mistral(text: str) -> list[tuple[Any, Any]]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or the newer `[TOOL_CALLS]name{...}`."""
    text = text.removeprefix("[TOOL_CALLS]").lstrip()
    if text.startswith("["):
        calls, end = _DECODER.raw_decode(text)
        if text[end:].strip():
            raise ValueError("text after the calls")
        return [_name_and_arguments(call) for call in calls]
    result = []
    for part in text.split("[TOOL_CALLS]"):
        match = re.fullmatch(r"\s*([a-zA-Z0-9_-]+)\s*(?:\[ARGS\])?\s*(\{.*\})\s*", part, flags=re.DOTALL)
        if not match:
            raise ValueError("expected a name and its arguments")
        result.append((match[1], json.loads(match[2])))
    return result


def _objects(text: str) -> list[Any]:
    found, text = [], text.strip()
    while text:
        value, end = _DECODER.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip(" \n\t;")
    return found


HERMES = ToolFormat("hermes", "<tool_call>", "", _read_hermes)
LLAMA3 = ToolFormat("llama3_json", "<|python_tag|>", "{", _read_llama3)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", _read_mistral)
FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3, MISTRAL)}


def detect_format(codec: TextCodec) -> ToolFormat:
    """The one whose marker the template or the vocabulary knows; Llama 3's plain JSON where none does."""
    template, vocabulary = codec.template, codec.tokenizer.get_vocab()
    for tool_format in (HERMES, MISTRAL):
        if tool_format.marker in template or tool_format.marker in vocabulary:
            return tool_format
    return LLAMA3


class ToolReader:
    """One answer's text on its way to a client: what is plain is given out at once, what may be a call is held back."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, only_one: bool = False) -> None:
        self._format, self._names, self._only_one = tool_format, names, only_one
        self._held = ""

    def feed(self, text: str) -> str:
        self._held += text
        at = self._format.start(self._held)
        plain, self._held = self._held[:at], self._held[at:]
        if plain.strip():
            self._format = _without_opening(self._format)
        return plain

    def finish(self) -> tuple[str, list[ToolCall]]:
        """(plain text that was held back after all, the calls)."""
        calls = self._format.parse(self._held, self._names) if self._held.strip() else None
        if calls is None:
            return self._held, []
        return "", calls[:1] if self._only_one else calls


def _without_opening(tool_format: ToolFormat) -> ToolFormat:
    return ToolFormat(tool_format.name, tool_format.marker, "", tool_format.read)


class ForcedCalls:
    """An answer that a grammar has made: one function's arguments (`name`), or a list of calls."""

    def __init__(self, name: str | None = None) -> None:
        self._name, self._held = name, ""

    def feed(self, text: str) -> str:
        self._held += text
        return ""

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Of an answer cut off by its length: a named function's broken arguments, as OpenAI does, or plain text."""
        if self._name is not None:
            return "", [make_call(self._name, self._held)]
        try:
            calls = json.loads(self._held)
        except ValueError:
            return self._held, []
        return "", [make_call(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]


class PlainText:
    """An answer without tools."""

    def feed(self, text: str) -> str:
        return text

    def finish(self) -> tuple[str, list[ToolCall]]:
        return "", []


AnswerReader = ToolReader | ForcedCalls | PlainText
