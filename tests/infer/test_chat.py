"""A conversation on a terminal: turns, commands, and what is not computed again."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from medusa.infer import generate
from medusa.infer.chat import Chat, run_chat
from serving import CONTEXT, served_model


@pytest.fixture(scope="module")
def model():
    return served_model()


@pytest.fixture
def screen():
    return io.StringIO()


@pytest.fixture
def chat(model, screen):
    console = Console(file=screen, force_terminal=True, color_system="standard", width=500)
    return Chat(model, console, max_new_tokens=40)


def talk(chat, *lines):
    """`KeyboardInterrupt` among the lines is pressed there."""
    left = list(lines)

    def read_line():
        if not left:
            raise EOFError
        line = left.pop(0)
        if line is KeyboardInterrupt:
            raise line
        return line

    run_chat(chat, read_line)


def test_turns_are_generates_answers_and_earlier_ones_are_known(chat, model, screen):
    talk(chat, "hello", "", "again")
    first, second = (message["content"] for message in chat.messages if message["role"] == "assistant")
    assert first == generate(model, ["hello"], max_new_tokens=40)[0].text
    assert second == generate(model, [chat.messages[:3]], max_new_tokens=40)[0].text
    assert "0 of 24 prompt tokens known already, cut off" in screen.getvalue()
    request = chat.answer("third")
    assert request.num_cached_tokens >= 64


def test_drafted_text_is_green(chat, screen):
    chat.max_new_tokens = 200
    talk(chat, "hello")
    assert "\x1b[32m" in screen.getvalue()
    plain = screen.getvalue()
    chat.reset()
    chat.speculate = False
    talk(chat, "hello")
    assert "\x1b[32m" not in screen.getvalue()[len(plain) :]


def test_commands(chat, screen, tmp_path):
    path = tmp_path / "talk.jsonl"
    chat.system = "Be brief."
    talk(chat, "/reset", "hello", f"/save {path}", "/reset", "/save", "/nonsense", "/exit", "never said")
    [record] = map(json.loads, path.read_text().splitlines())
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant"]
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert "expected /save FILE" in screen.getvalue() and "got the command /nonsense" in screen.getvalue()


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(chat, monkeypatch, screen):
    steps, step = [], chat._engine.step

    def interrupted():
        steps.append(1)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(chat._engine, "step", interrupted)
    talk(chat, KeyboardInterrupt, "hello")
    assert "stopped" in screen.getvalue() and chat.messages[-1]["content"]
    monkeypatch.undo()
    talk(chat, "again")
    assert len(chat.messages) == 4


def test_a_conversation_that_is_too_long_is_said_and_left_as_it_was(chat, screen):
    talk(chat, "x" * CONTEXT)
    assert f"the context holds {CONTEXT}; /reset begins anew" in screen.getvalue() and chat.messages == []
