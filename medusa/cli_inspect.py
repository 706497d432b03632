"""`medusa inspect ...`: look at data, a run, heads or a tree. Part of the composition root, as cli.py is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import BadRecord, Base, Data, Heads, JsonOut, MaxLength, OnBadRecord, open_console, write_json

app = typer.Typer(help="Look at data, a training run, heads or a draft tree.")


@app.command("data")
def inspect_data(
    data: Data,
    base: Base,
    limit: Annotated[int, typer.Option(min=0, help="Conversations to show.")] = 3,
    max_length: MaxLength = 2048,
    on_bad_record: BadRecord = OnBadRecord.error,
) -> None:
    """Show conversations with the tokens under loss in colour, and statistics over all of them."""
    console = open_console()
    from .train.inspect_data import inspect_data as show

    show(data, base, limit, on_bad_record.value, max_length, console)


@app.command("heads")
def inspect_heads(heads: Heads) -> None:
    """Show what a heads directory holds: design, base model, tensors, tree, training."""
    from .infer.show_heads import show_heads

    show_heads(heads, open_console())


@app.command("tree")
def inspect_tree(
    heads: Heads, png: Annotated[Path | None, typer.Option(help="Also draw it here, with its curves.")] = None
) -> None:
    """Draw the draft tree and the numbers that chose it."""
    from .calibration import Calibration
    from .checkpoint import load_heads
    from .infer.draw_tree import draw_tree_png, draw_tree_text

    calibration = Calibration.load(heads / load_heads(heads)[1].tree)
    draw_tree_text(calibration, open_console())
    if png:
        print(f"picture: {draw_tree_png(calibration, png)}")


@app.command("run")
def inspect_run(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Output directory of `medusa train`.", show_default=False)
    ],
    png: Annotated[Path | None, typer.Option(help="Picture to draw; default: DIR/training/run.png.")] = None,
    json: JsonOut = None,
) -> None:
    """Show how a training run went or goes: settings, data, speed, accuracy of each head; and draw its curves."""
    from .train.plot_run import plot_run
    from .train.run_report import read_run
    from .train.show_run import show_run

    report = read_run(folder)
    show_run(report, open_console())
    write_json(json, report.to_dict())
    if report.train or png:
        print(f"picture: {plot_run(report, png or folder / 'training' / 'run.png')}")
