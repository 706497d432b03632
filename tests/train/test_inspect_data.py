"""`inspect data`: the mask is seen in colour on a terminal and in brackets in a pipe."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from medusa.train.batching import Example
from medusa.train.inspect_data import inspect_data, mask_runs, show_mask


def console(terminal: bool, **options) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=100, color_system="standard" if terminal else None
    )


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


@pytest.fixture
def example(tokenizer) -> Example:
    ids = torch.tensor(tokenizer("ask [red]me<|im_end|>ok<|im_end|>\n", add_special_tokens=False)["input_ids"])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[-4:-1] = True  # o k <|im_end|>
    return Example(ids, mask)


def test_colour_on_a_terminal(tokenizer, example):
    target = console(True)
    show_mask(tokenizer, example, target)
    assert "\x1b[1;32mok<|im_end|>\x1b[0m" in printed(target)
    assert "\x1b[2mask [red]me<|im_end|>\x1b[0m" in printed(target)
    assert "⟦" not in printed(target)


def test_brackets_in_a_pipe(tokenizer, example):
    target = console(False)
    show_mask(tokenizer, example, target)
    assert printed(target) == "ask [red]me<|im_end|>⟦ok<|im_end|>⟧\n\n"


def test_brackets_where_colour_is_switched_off(tokenizer, example):
    target = console(True)
    target.no_color = True
    show_mask(tokenizer, example, target)
    assert "⟦ok<|im_end|>⟧" in printed(target)


def test_runs_alternate_and_control_characters_are_made_visible(example):
    class Tokenizer:
        def decode(self, ids, **options):
            return f"\x1b[31m{len(ids)}\n"

    runs = list(mask_runs(Tokenizer(), example))
    assert runs == [(r"\x1b[31m12" + "\n", False), (r"\x1b[31m3" + "\n", True), (r"\x1b[31m1" + "\n", False)]
    everything = Example(example.input_ids, torch.ones(len(example), dtype=torch.bool))
    assert [under_loss for _, under_loss in mask_runs(Tokenizer(), everything)] == [True]


def test_the_first_conversations_and_statistics_of_all(tmp_path, tokenizer, tiny_base_dir):
    path = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    records = [{"messages": turns, "category": f"[c{i}]"} for i in range(5)]
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n{")
    target = console(False)
    dataset = inspect_data(
        [str(path)], str(tiny_base_dir), limit=2, on_bad_record="skip", max_length=64, console=target
    )
    assert len(dataset) == 5
    text = printed(target)
    assert text.count("⟦ok<|im_end|>⟧") == 2
    assert "conversation 2, [c1]: " in text and "3 under loss" in text and "conversation 3" not in text
    assert "conversations  5" in text and "1 broken JSON" in text


def test_a_base_without_tokenizer_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"--base .*none: got no tokenizer .* expected a model directory or a Hub name"
    ):
        inspect_data("data.jsonl", str(tmp_path / "none"))
