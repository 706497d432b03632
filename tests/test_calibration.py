"""Choosing the tree that pays, and reading back only what was really written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa.calibration import AcceptanceStatistics, Calibration, best_tree, choose_tree
from medusa.dynamic_statistics import DynamicTree
from medusa.latency_curve import BatchLatency, interpolate_latency
from medusa.tree import DraftTree

FLAT = {1: 0.05, 2: 0.05, 64: 0.05}
STEEP = {1: 0.05, 2: 0.10, 64: 3.2}
REAL = {1: 0.057, 8: 0.088, 16: 0.102, 32: 0.148}


def measured(seed: int = 0, num_positions: int = 2000) -> AcceptanceStatistics:
    generator = torch.Generator().manual_seed(seed)
    hard = torch.rand(num_positions, 1, generator=generator) * 4
    noise = -torch.log(torch.rand(num_positions, 4, generator=generator))
    statistics = AcceptanceStatistics(4, 10)
    statistics.update((noise * hard * torch.tensor([0.4, 0.8, 1.2, 1.6])).long())
    return statistics


def test_chosen_tree_has_the_highest_speedup_of_all_sizes() -> None:
    statistics = measured()
    calibration = choose_tree(statistics, REAL, propose_seconds=0.004)
    speedups = {}
    for size in range(1, 33):
        seconds = REAL[1] if size == 1 else interpolate_latency(REAL, size) + 0.004
        speedups[size] = statistics.expected_length(best_tree(statistics, size)) * REAL[1] / seconds
    best = max(speedups, key=lambda size: speedups[size])
    assert 1 < best < 32, "the case must have its optimum inside, or it shows nothing"
    assert calibration.tree == best_tree(statistics, best)
    for candidate in calibration.candidates:
        assert candidate.speedup == pytest.approx(speedups[candidate.num_nodes], rel=1e-9)
        assert candidate.cost == pytest.approx(interpolate_latency(REAL, candidate.num_nodes) / REAL[1])


def test_free_forwards_want_every_node_and_dear_ones_none() -> None:
    assert choose_tree(measured(), FLAT).tree.num_nodes == 64
    dear = choose_tree(measured(), STEEP)
    assert dear.tree == DraftTree.root_only() and dear.chosen.speedup == 1.0
    assert choose_tree(measured(), REAL, propose_seconds=1.0).tree == DraftTree.root_only()


def test_nothing_measured_or_only_one_token_means_no_drafts() -> None:
    assert choose_tree(AcceptanceStatistics(2, 3), FLAT).tree.num_nodes == 1
    assert choose_tree(measured(), {1: 0.1}).tree.num_nodes == 1


def test_break_even_prefers_the_smaller_tree() -> None:
    statistics = AcceptanceStatistics(1, 2)
    statistics.update(torch.tensor([[0], [2]]))
    assert choose_tree(statistics, {1: 1.0, 2: 1.5}).tree.num_nodes == 1
    assert choose_tree(statistics, {1: 1.0, 2: 1.49}).tree.num_nodes == 2


def test_a_slow_spot_in_the_curve_is_stepped_over() -> None:
    bumpy = {1: 0.05, 2: 0.20, 4: 0.05, 5: 0.5}
    assert choose_tree(measured(), bumpy).tree.num_nodes == 4


def test_interpolation() -> None:
    curve = {1: 1.0, 4: 4.0, 8: 5.0}
    assert [interpolate_latency(curve, n) for n in (1, 2, 4, 6, 8)] == [1.0, 2.0, 4.0, 4.5, 5.0]


def test_held_out_tau_is_of_the_other_half() -> None:
    """With few positions and many ranks the choice flatters itself; the other half says by how much."""
    few = AcceptanceStatistics(4, 10)
    few.update(torch.randint(11, (40, 4), generator=torch.Generator().manual_seed(0)))
    other = AcceptanceStatistics(4, 10)
    other.update(torch.randint(11, (4000, 4), generator=torch.Generator().manual_seed(1)))
    calibration = choose_tree(few, FLAT, held_out=other)
    assert calibration.held_out_tau == other.expected_length(calibration.tree)
    assert calibration.held_out_tau < calibration.chosen.tau - 0.2
    assert choose_tree(few, FLAT).held_out_tau is None


@pytest.mark.parametrize(
    "curve, propose, message",
    [
        ({2: 0.1, 4: 0.2}, 0.0, r"measured at \[2, 4\] tokens, but c\(N\) needs 1 token"),
        ({1: 0.1, 2: 0.0}, 0.0, "2 tokens take 0.0 s"),
        ({1: float("nan")}, 0.0, "1 tokens take nan s"),
        ({0: 0.1, 1: 0.1}, 0.0, "0 tokens take"),
        ({1: 0.1}, -1.0, "propose_seconds is -1.0"),
    ],
)
def test_bad_measurements_are_refused(curve: dict[int, float], propose: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_tree(measured(), curve, propose_seconds=propose)


@pytest.fixture
def calibration() -> Calibration:
    dynamic = DynamicTree((1.0, 1.6), (1.0, 1.5), DraftTree.from_paths([(0,), (0, 0)]), 2.5, 1.9, 1.4)
    return choose_tree(
        measured(),
        REAL,
        propose_seconds=0.004,
        held_out=measured(1),
        machine={"cpu": "two cores"},
        temperatures=(0.9, 1.1, 1.2, 1.4),
        dynamic=dynamic,
        by_rows={4: BatchLatency({1: 0.1, 4: 0.16}, 0.01), 16: BatchLatency({1: 0.2, 4: 0.5}, 0.03)},
    )


def test_json_round_trip(calibration: Calibration, tmp_path: Path) -> None:
    assert Calibration.from_json(calibration.to_json()) == calibration
    calibration.save(tmp_path / "tree.json")
    assert Calibration.load(tmp_path / "tree.json") == calibration
    assert [path.name for path in tmp_path.iterdir()] == ["tree.json"], "nothing temporary is left"
    assert json.loads((tmp_path / "tree.json").read_text())["latency_curve"]["16"] == 0.102


def test_root_only_round_trip() -> None:
    root_only = choose_tree(measured(), STEEP)
    assert Calibration.from_json(root_only.to_json()) == root_only


def test_files_of_version_1_are_read_with_temperatures_of_1(calibration: Calibration) -> None:
    old = json.loads(calibration.to_json()) | {"schema_version": 1}
    del old["temperatures"], old["dynamic"]
    loaded = Calibration.from_json(json.dumps(old))
    assert loaded.temperatures == (1.0,) * 4 and loaded.dynamic is None and loaded.tree == calibration.tree


def test_files_of_version_2_know_nothing_of_rows(calibration: Calibration) -> None:
    old = json.loads(calibration.to_json()) | {"schema_version": 2}
    del old["by_rows"]
    loaded = Calibration.from_json(json.dumps(old))
    assert loaded.by_rows == {} and loaded.tree == calibration.tree
    assert loaded.latency.forward(4, 4) == loaded.latency.forward(1, 16) == REAL[16]


def test_a_failed_save_keeps_the_old_file(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    calibration.save(path)
    broken = choose_tree(measured(), REAL, machine={"load": float("nan")})
    with pytest.raises(ValueError):
        broken.save(path)
    assert Calibration.load(path) == calibration and len(list(tmp_path.iterdir())) == 1


def test_the_file_stays_small_however_many_paths_were_seen() -> None:
    statistics = AcceptanceStatistics(5, 10)
    statistics.update(torch.randint(10, (30_000, 5), generator=torch.Generator().manual_seed(0)))
    assert len(statistics.matches) > 20_000
    text = choose_tree(statistics, REAL).to_json()
    assert len(text) < 300_000 and Calibration.from_json(text).statistics.num_positions == 30_000


def edited(calibration: Calibration, **changes: Any) -> str:
    """JSON of the calibration with fields replaced; `a__b` reaches into `a`; None as a value removes the field."""
    data = json.loads(calibration.to_json())
    for name, value in changes.items():
        *outer, last = name.split("__")
        target = data
        for key in outer:
            target = target[key]
        target.pop(last) if value is REMOVED else target.__setitem__(last, value)
    return json.dumps(data)


REMOVED = object()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"schema_version": 4}, "schema_version: Input should be 1, 2 or 3"),
        ({"tree": REMOVED}, "tree: Field required"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"tree": [[0, 0]]}, r"path \[0, 0\] needs its prefix"),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0] * 4, [0] * 5]}, "there are 4 heads"),
        ({"tree": [[99]]}, "uses rank 99, but only ranks below 10"),
        ({"tree": [["0"]]}, "valid integer"),
        ({"tree": [[0], [1], [2], [3], [4], [5], [6], [7], [8], [9], *[[0, r] for r in range(10)],
                   *[[1, r] for r in range(10)], *[[2, r] for r in range(10)]]}, "no candidate of that size"),
        ({"tau": float("nan")}, "tau: "),
        ({"latency_curve": {"2": 0.1}}, "c.N. needs 1 token"),
        ({"latency_curve": {"one": 0.1}}, "expected numbers of tokens"),
        ({"latency_curve": {"1": -1.0}}, "greater than 0"),
        ({"propose_seconds": -1.0}, "propose_seconds"),
        ({"by_rows__4__latency_curve": {"2": 0.1}}, "c.N. needs 1 token"),
        ({"by_rows__4__propose_seconds": -1.0}, "by_rows.4.propose_seconds"),
        ({"by_rows": {"one": {"latency_curve": {"1": 0.1}, "propose_seconds": 0.0}}}, "expected numbers of rows"),
        ({"temperatures": [1.0, 2.0]}, "temperatures has 2 numbers, expected one for each head"),
        ({"temperatures": REMOVED}, "temperatures has 0 numbers"),
        ({"temperatures": [1.0, 1.0, 1.0, 0.0]}, "greater than 0"),
        ({"dynamic__typical": [[0, 0]]}, r"path \[0, 0\] needs its prefix"),
        ({"dynamic__kept": REMOVED}, "dynamic.kept: Field required"),
        ({"statistics__num_heads": 3}, "rank_counts is not 3 rows"),
        ({"statistics__matches": []}, "different numbers of positions"),
        ({"statistics__matches": [[[11], 2000]]}, r"path \[11\], expected at most 4 ranks below 10"),
        ({"statistics__matches": [[[], 1000], [[], 1000]]}, "lists a path twice"),
    ],
)  # fmt: skip
def test_corrupted_files_are_refused(calibration: Calibration, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Calibration.from_json(edited(calibration, **changes), source="heads/tree.json")
    assert str(caught.value).startswith("heads/tree.json: ") and "medusa calibrate" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_refused(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    with pytest.raises(ValueError, match="cannot be read"):
        Calibration.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        Calibration.load(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        Calibration.load(path)
    path.write_text(calibration.to_json()[:-200])
    with pytest.raises(ValueError, match="tree.json: the file: Invalid JSON"):
        Calibration.load(path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"tree\.json"):
        Calibration.load(path)
