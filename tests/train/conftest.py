"""A tiny base, a few conversations, and configs of runs over them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

WORDS = ["the cat", "a dog", "sat on", "mat", "runs fast", "ok", "yes, it", "is late"]


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 conversations of one turn each."""
    choose = random.Random(0)

    def text(num_words: int) -> str:
        return " ".join(choose.choice(WORDS) for _ in range(num_words))

    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = [(text(choose.randint(1, 3)), text(choose.randint(1, 8))) for _ in range(40)]
    lines = [
        {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}
        for user, answer in turns
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def config_file(tmp_path: Path, tiny_base_dir: Path, chat_file: Path) -> Callable[..., Path]:
    """config_file(section__key=value, ...) -> a YAML file; each output directory is tmp_path / `out`."""

    def write(out: str = "out", **settings: Any) -> Path:
        content: dict[str, dict[str, Any]] = {
            "model": {"base": str(tiny_base_dir)},
            "heads": {"num_heads": 3, "num_layers": 2, "draft_vocab_size": 40},
            "data": {"path": str(chat_file), "max_length": 96, "holdout_fraction": 0.1},
            "optim": {"batch_size": 4, "epochs": 1, "lr": 1e-2},
            "train": {"output_dir": str(tmp_path / out), "log_every": 1, "save_every": 1000},
        }
        for name, value in settings.items():
            section, key = name.split("__")
            content.setdefault(section, {})[key] = value
        path = tmp_path / f"{out}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def make_config(config_file: Callable[..., Path]) -> Callable[..., Any]:
    """Like `config_file`, but the loaded TrainConfig."""
    from medusa.train.config import load_config

    return lambda out="out", **settings: load_config(config_file(out, **settings))


@pytest.fixture
def read_metrics(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """read_metrics(out, kind) -> the records of that kind."""

    def read(out: str = "out", kind: str = "train") -> list[dict[str, Any]]:
        lines = (tmp_path / out / "training" / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    return read


@pytest.fixture
def break_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """break_at(n, error): the n-th micro-batch from now on fails, once."""
    from medusa.train import loop

    def arm(number: int, error: Exception | None = None) -> None:
        forward, calls = loop.forward, []

        def failing(run: Any, indices: list[int], ramp: float = 0.0) -> Any:
            calls.append(indices)
            if len(calls) == number:
                raise error or RuntimeError("broken off")
            return forward(run, indices, ramp)

        monkeypatch.setattr(loop, "forward", failing)

    return arm
