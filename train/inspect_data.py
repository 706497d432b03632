"""`medusa inspect data`: conversations with the tokens under loss marked, as training will see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer

from .batching import Example
from .conversation import OnBadRecord
from .dataset import TokenizedDataset, build_dataset

LOSS_STYLE, OTHER_STYLE = "bold green", "dim"
BRACKETS = ("⟦", "⟧")  # stand for the colour where there is none


def inspect_data(
    data: str | Sequence[str],
    base: str,
    limit: int = 3,
    on_bad_record: OnBadRecord = "error",
    max_length: int = 2048,
    console: Console | None = None,
) -> TokenizedDataset:
    """Prints the first `limit` conversations of `data` with their loss mask, and statistics over all of them.

    `base`: directory or Hub name whose tokenizer is used. Raises ValueError for a base or data that cannot be read.
    """
    console = console or Console()
    tokenizer = load_tokenizer(base)
    dataset = build_dataset(data, tokenizer, max_length, on_bad_record, console=console)
    has_colour = _has_colour(console)
    marks = LOSS_STYLE if has_colour else "in {}...{}".format(*BRACKETS)
    console.print(f"Tokens under loss are {marks}.", highlight=False)
    for number, example in enumerate(dataset.examples[:limit], 1):
        console.rule(Text(_title(number, example)), characters="-")
        show_mask(tokenizer, example, console)
    console.rule("all of the data", characters="-")
    console.print(str(dataset.statistics), highlight=False, markup=False)
    return dataset


def show_mask(tokenizer: Any, example: Example, console: Console) -> None:
    """Prints one example: tokens under loss coloured, the others dim; in brackets where there is no colour."""
    has_colour = _has_colour(console)
    text = Text()
    for piece, under_loss in mask_runs(tokenizer, example):
        if under_loss and not has_colour:
            piece = BRACKETS[0] + piece + BRACKETS[1]
        text.append(piece, style=LOSS_STYLE if under_loss else OTHER_STYLE)
    console.print(text, soft_wrap=True)


def mask_runs(tokenizer: Any, example: Example) -> Iterator[tuple[str, bool]]:
    """The example's text in pieces, each with whether its tokens are under loss. Together they are the whole.

    Decoded run by run, not token by token, since a character may be spread over several tokens.
    """
    changes = torch.nonzero(example.loss_mask[1:] != example.loss_mask[:-1]).flatten() + 1
    for ids, mask in zip(
        torch.tensor_split(example.input_ids, changes), torch.tensor_split(example.loss_mask, changes), strict=True
    ):
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        yield _printable(text), bool(mask[0])


def load_tokenizer(base: str) -> Any:
    """The tokenizer alone, without the base model's weights. Raises ValueError."""
    try:
        return AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"--base {base}: got no tokenizer ({reason}), expected a model directory or a Hub name; check the name"
        ) from error


def _has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _title(number: int, example: Example) -> str:
    loss = int(example.loss_mask.sum())
    category = f", {example.category}" if example.category else ""
    return f"conversation {number}{category}: {len(example)} tokens, {loss} under loss"


def _printable(text: str) -> str:
    """Control characters made visible: data must not drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
