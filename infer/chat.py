"""A conversation on a terminal: answers as they come, drafted tokens in green, earlier turns never computed again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from medusa.model import MedusaModel
from medusa.sampling import GREEDY_SAMPLING, SamplingParams

from .engine import Engine
from .generation import encode_prompt
from .prefix_cache import PREFIX_CACHE_BYTES
from .request import Request

MAX_CONTEXT = 8192  # tokens that the cache is made for, where the model has more
HELP = (
    "/reset begins anew, /save FILE writes the conversation (JSONL, as for training), /exit or Ctrl-D leaves; Ctrl-C \
stops an answer"
)


@dataclass
class Chat:
    """system: a system prompt, "" for none. stop: strings that end an answer. max_new_tokens: of an answer."""

    model: MedusaModel
    console: Console
    system: str = ""
    max_new_tokens: int = 1024
    stop: Sequence[str] = ()
    sampling: SamplingParams = GREEDY_SAMPLING
    speculate: bool = True
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        base = self.model.base
        self._context = min(base.max_positions, MAX_CONTEXT)
        self._engine = Engine(
            base,
            self.model.drafter(),
            max_rows=1,
            capacity=self._context,
            prefix_cache_bytes=PREFIX_CACHE_BYTES,
        )
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def save(self, path: Path) -> None:
        """Add the conversation to a JSONL file, as `medusa train` reads it."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")

    def answer(self, text: str) -> Request:
        """Ask, and show the answer as it comes. Raises ValueError for a conversation that the context cannot hold."""
        request = self._request([*self.messages, {"role": "user", "content": text}])
        self._engine.submit(request)
        while not request.is_finished:
            try:
                for _, piece in self._engine.step():
                    style = "green" if piece.num_drafted_accepted else ""
                    self.console.print(Text(piece.text, style=style), end="", soft_wrap=True)
            except KeyboardInterrupt:
                request.cancel()
        if request.error is not None:
            raise request.error
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": request.text}]
        self._show_statistics(request)
        return request

    def _request(self, messages: list[dict[str, str]]) -> Request:
        base = self.model.base
        ids = encode_prompt(base.tokenizer, messages)
        room = self._context - len(ids)
        if room < 1:
            raise ValueError(
                f"chat: the conversation has {len(ids)} tokens, the context holds {self._context}; /reset begins anew"
            )
        return Request(
            ids,
            min(room, self.max_new_tokens),
            base.eos_token_ids,
            base.tokenizer,
            list(self.stop),
            self.sampling,
            speculate=self.speculate,
        )

    def _show_statistics(self, request: Request) -> None:
        stats, num_prompt = request.stats, len(request.prompt_ids)
        ended = {"abort": ", stopped", "length": ", cut off by --max-new-tokens"}.get(request.finish_reason or "", "")
        line = (
            f"{stats.num_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, "
            f"{stats.mean_acceptance_length:.2f} per step, "
            f"{request.num_cached_tokens} of {num_prompt} prompt tokens known already{ended}"
        )
        self.console.print()
        self.console.print(line, style="dim", highlight=False)


def run_chat(chat: Chat, read_line: Callable[[], str]) -> None:
    """Until `read_line` raises EOFError, or /exit. A mistake is one line, and the conversation goes on."""
    chat.console.print(HELP, style="dim", highlight=False, markup=False)
    while True:
        try:
            line = read_line().strip()
            if line == "/exit":
                return
            if line:
                _do(chat, line)
        except EOFError:
            chat.console.print()
            return
        except KeyboardInterrupt:
            chat.console.print()
        except (ValueError, OSError) as error:
            chat.console.print(f"error: {error}", style="red", highlight=False, markup=False)


def _do(chat: Chat, line: str) -> None:
    command, _, argument = line.partition(" ")
    if command == "/reset":
        chat.reset()
        chat.console.print("a new conversation", style="dim")
    elif command == "/save":
        if not argument.strip():
            raise ValueError("/save: got no file, expected /save FILE")
        chat.save(Path(argument.strip()).expanduser())
        chat.console.print(f"saved: {argument.strip()}", style="dim", highlight=False, markup=False)
    elif command in ("/help", "/?"):
        chat.console.print(HELP, style="dim", highlight=False, markup=False)
    elif command.startswith("/") and command[1:].isalpha():
        raise ValueError(f"got the command {command}, expected /reset, /save FILE, /help or /exit")
    else:
        chat.answer(line)
