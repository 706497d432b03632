"""Where in the rendering of a conversation the assistant's turns are: exactly, or an error; never a guess.

The tokenizer's own chat template renders the conversation, and each answer is found in the rendering by experiment,
not by searching for its text, which may occur twice or be edited by the template: with the answer replaced by a
marker, what stands before and behind the marker is the template's. Where the template writes something else in front
of this very answer (it moves thinking about), the answer starts where the generation prompt ends, since that is where
the model starts to write. All of it is checked against the whole rendering. A template with `{% generation %}` blocks
says where answers are itself. Characters only; tokens are chat_mask.py's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, str]
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKER = "\ue000answer\ue001"  # private-use characters: templates neither write nor edit them


class MaskError(ValueError):
    """This conversation, or this template at all, cannot be masked exactly. `reason`: a few words to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[MaskError], tuple[str, str]]:
        """Errors pass between processes, which by default would call __init__ with the message alone."""
        return MaskError, (self.reason, str(self))


@dataclass(frozen=True)
class Turn:
    """An assistant turn of a rendering. text[start:end] is the answer as the template writes it; text[end:tail] is
    the template's and belongs to the turn. `end_is_open`: the turn may be ended behind `tail`, differently than it
    would be as the last one."""

    start: int
    end: int
    tail: int
    end_is_open: bool = False


@dataclass(frozen=True)
class Rendering:
    text: str
    turns: list[Turn]


class ChatRenderer:
    """One tokenizer's chat template. Raises MaskError where it has none."""

    def __init__(self, tokenizer: Any, special_texts: list[str]) -> None:
        self.name = tokenizer_name(tokenizer)
        if not tokenizer.chat_template:
            raise MaskError(
                "no chat template",
                f"tokenizer {self.name}: got no chat template, expected one; use a chat model's tokenizer, or give "
                "records with prompt_ids and answer_ids",
            )
        self.tokenizer = tokenizer
        self.special_texts = special_texts
        self.template: str = tokenizer.get_chat_template()
        self.marks_answers = bool(GENERATION_BLOCK.search(self.template))

    def render(self, messages: list[Message]) -> Rendering:
        """The conversation's text and its assistant turns, in order. Raises MaskError."""
        if any(MARKER in message["content"] for message in messages):
            raise MaskError("marker in the text", f"got {MARKER!r} in a turn, expected ordinary text; remove it")
        try:
            rendering = self._render_blocks(messages) if self.marks_answers else self._render(messages)
        except jinja2.TemplateError as error:
            raise MaskError(
                "refused by the chat template",
                f"got a conversation that the chat template of {self.name} refuses ({error}), expected one that it "
                "renders; change its roles or leave it out",
            ) from error
        turns = rendering.turns
        if any(turn.tail > following.start for turn, following in zip(turns, turns[1:], strict=False)):
            raise self.unmaskable("its answers run into each other")
        return rendering

    def _render(self, messages: list[Message]) -> Rendering:
        text = self._text(messages)
        return Rendering(text, [self._find(messages, i, text) for i in _answers(messages)])

    def _find(self, messages: list[Message], i: int, text: str) -> Turn:
        before, behind = self._around_marker(messages, i)
        if not text.endswith(behind):
            raise self.unmaskable("what it writes behind an answer depends on the answer")
        start, end = self._start(messages[:i], before, text), len(text) - len(behind)
        if start > end:
            raise self.unmaskable("an answer's start and end cannot be told apart")
        if i == len(messages) - 1:
            return Turn(start, end, len(text))
        return self._turn(start, end, text, self._around_marker(messages[: i + 1], i)[1])

    def _turn(self, start: int, end: int, text: str, own_rest: str) -> Turn:
        """`own_rest`: what the template writes behind this answer when no message follows."""
        shared = 0
        while shared < min(len(own_rest), len(text) - end) and own_rest[shared] == text[end + shared]:
            shared += 1
        is_open = shared < len(own_rest) and any(special in own_rest for special in self.special_texts)
        return Turn(start, end, end + shared, is_open)

    def _around_marker(self, messages: list[Message], i: int) -> tuple[str, str]:
        """The text before and behind answer i, found by rendering a marker in its place."""
        marked = self._text([*messages[:i], {**messages[i], "content": MARKER}, *messages[i + 1 :]])
        before, *behind = marked.split(MARKER)
        if len(behind) != 1:
            raise self.unmaskable(f"it writes an answer {len(behind)} times")
        return before, behind[0]

    def _start(self, history: list[Message], before: str, text: str) -> int:
        prompt = self._text(history, generation_prompt=True)
        if text.startswith(before):
            # A space behind the prompt is the model's to write; tokens often hold it and the first word together.
            only_space = before.startswith(prompt) and not before[len(prompt) :].strip()
            return len(prompt) if only_space else len(before)
        if text.startswith(prompt) and before.startswith(prompt) and prompt != self._text(history):
            return len(prompt)
        raise self.unmaskable("what it writes before an answer depends on the answer")

    def _text(self, messages: list[Message], generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)

    # ---- templates with {% generation %}

    def _render_blocks(self, messages: list[Message]) -> Rendering:
        text, spans = self._blocks(messages)
        answers = _answers(messages)
        if len(spans) != len(answers):
            raise self.unmaskable(f"it marks {len(spans)} generation blocks for {len(answers)} answers")
        turns = []
        for (start, end), i in zip(spans, answers, strict=True):
            own_text, own_spans = self._blocks(messages[: i + 1])
            if not own_spans:
                raise self.unmaskable("it marks an answer only when other messages follow")
            turns.append(self._turn(start, end, text, own_text[own_spans[-1][1] :]))
        return Rendering(text, turns)

    def _blocks(self, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text and its generation blocks as (start, end)."""
        texts, spans = render_jinja_template(
            conversations=[messages],
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], [(start, end) for start, end in spans[0] if end > start]

    def unmaskable(self, why: str) -> MaskError:
        return MaskError(
            "template cannot be masked",
            f"got the chat template of {self.name}, which cannot be masked exactly ({why}), expected one whose answers "
            "can be told from the rest; mark them with {% generation %} in the template, split the conversation into "
            "single turns, or give records with prompt_ids and answer_ids",
        )


def tokenizer_name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _answers(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]
