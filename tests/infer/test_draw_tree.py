"""The pictures: every node is in them, with its probability, and nothing lies on top of another."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from medusa.calibration import AcceptanceStatistics, Calibration, choose_tree
from medusa.dynamic_statistics import DynamicTree
from medusa.infer.draw_tree import draw_tree_png, draw_tree_text, layout_nodes
from medusa.tree import DraftTree

MISS = 3


def calibrated(latency_curve: dict[int, float]) -> Calibration:
    """Paths (0,), (0, 1) and (1,) with chances 60 %, 20 % and 20 %."""
    statistics = AcceptanceStatistics(2, MISS)
    statistics.update(torch.tensor([[0, 1], [0, MISS], [0, MISS], [1, MISS], [MISS, MISS]]))
    return choose_tree(statistics, latency_curve, held_out=statistics)


def printed(drawn: Calibration | DraftTree) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    draw_tree_text(drawn, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_text_names_nodes_probabilities_and_numbers() -> None:
    text = printed(calibrated({1: 0.1, 4: 0.11}))
    lines = text.splitlines()
    assert lines[0] == "root"
    assert [line.split("━")[0].lstrip("│├└─ ").split() for line in lines[1:4]] == [
        ["0", "60.0%"],
        ["0.1", "20.0%"],
        ["1", "20.0%"],
    ]
    assert "4 nodes, depth 2" in text
    assert any(line.split()[1:4] == ["chosen", ">", "4"] and "2.00" in line and "1.10" in line for line in lines)
    assert "not seen: 2.00" in text


def test_text_of_a_bare_tree_has_no_probabilities() -> None:
    text = printed(DraftTree.from_paths([(0,), (1,), (0, 2)]))
    assert "%" not in text and "0.2" in text and "3 nodes" not in text and "4 nodes, depth 2" in text
    assert "nothing is drafted" in printed(DraftTree.root_only())


def with_dynamic(latency_curve: dict[int, float]) -> Calibration:
    typical = DraftTree.from_paths([(0,), (0, 0)])
    dynamic = DynamicTree((1.0, 1.61, 2.12, 2.23), (1.0, 1.52, 1.93, 2.04), typical, 2.9, 1.87, 1.44)
    return replace(calibrated(latency_curve), dynamic=dynamic, temperatures=(0.93, 1.27))


def test_text_shows_the_budget_of_trees_that_are_grown_anew() -> None:
    lines = printed(with_dynamic({1: 0.1, 4: 0.11})).splitlines()
    after = lines[next(i for i, line in enumerate(lines) if "grown anew" in line) :]
    assert [line.lstrip("│├└─ ") for line in after[1:4]] == ["root", "0", "0.0"]
    assert any("temperatures of the heads: 0.93, 1.27" in line for line in after)
    assert any(line.split()[1::2] == ["4", "2.23", "2.04", "1.10", "1.85"] for line in after)  # 2.04 / 1.1
    assert any("2.9 nodes on average, tau 1.87, speedup 1.44" in line for line in after)


def test_layout_puts_parents_amid_their_children() -> None:
    places = layout_nodes(DraftTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0)]))
    assert places == {
        (0, 0): (2.0, 0.0),
        (0, 1): (2.0, -1.0),
        (0, 2): (2.0, -2.0),
        (0,): (1.0, -1.0),
        (1, 0): (2.0, -3.0),
        (1,): (1.0, -3.0),
        (): (0.0, -2.0),
    }
    wide = layout_nodes(DraftTree.cartesian([4, 3, 2]))
    assert len(set(wide.values())) == len(wide) == 1 + 4 + 12 + 24


@pytest.mark.parametrize(
    "curve", [{1: 0.1, 4: 0.11}, {1: 0.1, 2: 9.0}, {1: 0.1}], ids=["tree", "root-only", "one-size"]
)
def test_png_is_written(curve: dict[int, float], tmp_path: Path) -> None:
    path = draw_tree_png(calibrated(curve), tmp_path / "new" / "tree.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and data.rstrip()[-8:-4] == b"IEND"
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert width > 1200 and height > 600


def test_png_shows_trees_that_are_grown_anew_too(tmp_path: Path) -> None:
    curve = {1: 0.1, 4: 0.11}
    first = draw_tree_png(calibrated(curve), tmp_path / "a.png").read_bytes()
    assert first != draw_tree_png(with_dynamic(curve), tmp_path / "b.png").read_bytes()


def test_png_of_another_tree_is_another_picture(tmp_path: Path) -> None:
    first = draw_tree_png(calibrated({1: 0.1, 4: 0.11}), tmp_path / "a.png").read_bytes()
    second = draw_tree_png(calibrated({1: 0.1, 2: 9.0}), tmp_path / "b.png").read_bytes()
    assert first != second


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'medusa-decoding\[plot\]'"):
        draw_tree_png(calibrated({1: 0.1}), tmp_path / "tree.png")
