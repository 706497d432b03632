"""`medusa generate --compare`: one answer three ways, text and speed side by side."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from medusa.model import MedusaModel

from .bench import WARM_UP_TOKENS
from .methods import METHODS, StockModel, make_methods

COMPARED = ("hf", "ar", "medusa")


def compare(
    model: MedusaModel, stock: StockModel, prompt_ids: list[int], max_new_tokens: int, console: Console
) -> bool:
    """Print the answer once where all agree, else each; then the speeds. Returns whether all tokens are the same."""
    methods = make_methods(model, stock)
    for name in COMPARED:
        methods[name](prompt_ids, min(WARM_UP_TOKENS, max_new_tokens))
    samples = {name: methods[name](prompt_ids, max_new_tokens) for name in COMPARED}
    texts = {name: model.base.tokenizer.decode(s.token_ids, skip_special_tokens=True) for name, s in samples.items()}
    reference = samples["hf"]
    for name, sample in samples.items():
        if name == "hf" or sample.token_ids != reference.token_ids:
            console.rule(f"{name}: {METHODS[name]}", characters="-")
            console.print(texts[name], markup=False, highlight=False)
    table = Table(box=None)
    table.add_column("method", no_wrap=True)
    for column in ("tokens", "seconds", "tokens/s", "vs hf", "tau", "same tokens"):
        table.add_column(column, justify="right")
    for name, sample in samples.items():
        speed = len(sample.token_ids) / sample.seconds
        table.add_row(
            name,
            str(len(sample.token_ids)),
            f"{sample.seconds:.2f}",
            f"{speed:.1f}",
            f"{speed * reference.seconds / len(reference.token_ids):.2f}x",
            f"{(len(sample.token_ids) - 1) / max(sample.num_steps, 1):.2f}",
            "yes" if sample.token_ids == reference.token_ids else "NO",
        )
    console.print(table)
    for name in COMPARED:
        console.print(f"{name}: {METHODS[name]}", style="dim", highlight=False)
    return all(sample.token_ids == reference.token_ids for sample in samples.values())
