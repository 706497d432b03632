"""The table of docs/interop.md: each cell is what really happens. MEDUSA_UPDATE_DOCS=1 writes it."""

from __future__ import annotations

import os
import re
import warnings

import pytest

from interop_layouts import LAYOUTS, write_heads
from medusa.interop.engines import ENGINES
from medusa.interop.export import export_heads
from medusa.interop.import_heads import import_heads
from medusa.interop.vllm import MedusaProposer

BEGIN, END = "<!-- table: begin (tests/interop/test_interop_table.py writes it) -->", "<!-- table: end -->"


class Table:
    """Rows of cells; reasons and conversions become notes below, each once."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)
        return str(self.notes.index(text) + 1)

    def cell(self, notes, refusal):
        if refusal:
            return f"no ({self.note(refusal)})"
        numbers = ", ".join(self.note(note) for note in notes)
        return f"yes ({numbers})" if numbers else "yes"


def general(text):
    """Without the numbers that belong to the tiny model."""
    text = re.sub(r", [\d.,]+ MB", "", text)
    text = re.sub(r"draft vocabulary of \d+ widened to \d+", "draft vocabulary widened to all", text)
    text = re.sub(r"calibrated tree of \d+ drafted tokens", "calibrated tree", text)
    text = re.sub(r"^(.*?): (got (markov|hydra|heads with fused))", r"\2", text)
    return re.sub(r" in /\S+", "", text)


def export_cell(table, base, heads, engine, folder):
    try:
        done = export_heads(heads, engine, folder)
    except ValueError as error:
        return table.cell([], general(str(error)))
    import_heads(folder, folder.with_suffix(".back"), base.name)
    return table.cell([general(note) for note in done.notes], None)


def custom_class_cell(table, base, heads):
    from types import SimpleNamespace

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(model=base.name, max_model_len=64, dtype=base.dtype),
        additional_config={"medusa_heads": str(heads)},
    )
    try:
        MedusaProposer(config)
    except ValueError as error:
        return table.cell([], general(str(error)))
    return table.cell([], None)


@pytest.fixture(scope="module")
def written(tmp_path_factory, base):
    folder, table = tmp_path_factory.mktemp("table"), Table()
    engines = [*ENGINES, "vLLM custom class"]
    lines = [f"| heads | {' | '.join(engines)} |", "| --- " * (len(engines) + 1) + "|"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (name, layout) in enumerate(LAYOUTS.items()):
            heads = write_heads(folder / str(number), base, **layout)
            cells = [export_cell(table, base, heads, engine, folder / f"{number}-{engine}") for engine in ENGINES]
            cells.append(custom_class_cell(table, base, heads))
            lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {note}" for number, note in enumerate(table.notes, 1)]
    return "\n".join([*lines, "", *notes])


def test_the_table_in_the_docs_is_what_happens(written, repo_root):
    path = repo_root / "docs" / "interop.md"
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if os.environ.get("MEDUSA_UPDATE_DOCS"):
        path.write_text(f"{before}{BEGIN}\n\n{written}\n\n{END}{after}", encoding="utf-8")
        return
    assert shown.strip() == written, "docs/interop.md is out of date: run this test with MEDUSA_UPDATE_DOCS=1"


def test_the_docs_name_every_engine_and_its_versions(repo_root):
    text = (repo_root / "docs" / "interop.md").read_text(encoding="utf-8")
    for engine in ENGINES.values():
        assert f"`{engine.name}`" in text and engine.versions in text, engine.name
