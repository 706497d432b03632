"""`medusa inspect run`: of finished and unfinished runs, with and without evaluations, damaged, and of none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from medusa.cli import run
from medusa.train.lock import claim_folder
from medusa.train.plot_run import smoothed
from medusa.train.run import train
from medusa.train.run_report import RunReport
from medusa.train.show_run import MAX_EVALUATIONS, _thinned, show_run


def inspect(capsys, *arguments):
    """Exit status, output with its line breaks taken out, and errors."""
    status = run(["inspect", "run", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), captured.err


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_a_finished_run(make_config, tmp_path, capsys, read_metrics):
    result = train(make_config(optim__epochs=2, train__eval_every=6))
    picture, numbers = tmp_path / "pictures" / "run.png", tmp_path / "run.json"
    status, output, _ = inspect(capsys, tmp_path / "out", "--png", picture, "--json", numbers)
    assert status == 0 and is_png(picture) and f"picture: {picture}" in output
    records, evaluations = read_metrics(), read_metrics(kind="eval")
    best = max(reversed(evaluations), key=lambda record: record["tau_16_nodes"])
    assert "finished: all steps done" in output
    assert f"{result.steps} steps, {result.tokens:,} tokens" in output
    assert f"loss {records[0]['loss']:.3f} (step 1) to {records[-1]['loss']:.3f} (step {result.steps})" in output
    assert f"best step {best['step']}: tau {best['tau_16_nodes']:.2f} (16-node tree)" in output
    assert f"best > {best['step']}" in output and "heads.draft_vocab_size=40" in output and "40 conversations" in output
    for top in ("head_top1", "head_top5", "head_top10"):
        assert f"{best[top][2]:.1%}" in output
    report = json.loads(numbers.read_text())
    assert report["evaluations"] == evaluations and report["last"] == records[-1] and report["first"] == records[0]
    assert (report["best_step"], report["stop_reason"]) == (best["step"], "all steps done")
    assert report["tokens_per_second"] == result.tokens_per_second and report["continues_from_step"] is None
    assert report["config"]["optim"]["lr"] == 0.01 and report["record"]["starts"][0]["step"] == 0


def test_an_unfinished_run_without_evaluations_whose_last_line_is_torn(make_config, tmp_path, capsys, break_at):
    break_at(6)
    config = make_config(train__save_every=4, data__holdout_fraction=0.0, train__trackers=[])
    with pytest.raises(RuntimeError, match="broken off"):
        train(config)
    training = tmp_path / "out" / "training"
    with (training / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    status, output, errors = inspect(capsys, tmp_path / "out", "--json", tmp_path / "run.json")
    assert status == 0 and errors == "" and is_png(training / "run.png")
    assert (
        "unfinished; goes on from step 4" in output and "5 steps, " in output and "by head, training, step 5" in output
    )
    assert "evaluations" not in output
    assert json.loads((tmp_path / "run.json").read_text())["continues_from_step"] == 4
    with claim_folder(training):
        assert "status running" in inspect(capsys, tmp_path / "out")[1]


def test_a_run_that_has_logged_nothing_yet(make_config, tmp_path, capsys):
    train(make_config())
    training = tmp_path / "out" / "training"
    for name in ("metrics.jsonl", "summary.json", "checkpoint.safetensors", "record.json"):
        (training / name).unlink()
    status, output, _ = inspect(capsys, tmp_path / "out")
    assert status == 0 and "no checkpoint, so it would begin again" in output and "picture" not in output
    status, _, errors = inspect(capsys, tmp_path / "out", "--png", tmp_path / "run.png")
    assert status == 2 and "got no logged steps yet" in errors


def test_brackets_in_names_are_no_markup():
    console = Console(width=200, record=True)
    show_run(RunReport(Path("out[bold]"), {}, None, [], [], None, None, False), console)
    assert "out[bold]" in console.export_text()


def test_a_directory_that_is_no_run(tmp_path, capsys):
    status, _, errors = inspect(capsys, tmp_path)
    assert status == 2 and "got a directory without training/config.yaml, expected the train.output_dir of a" in errors
    status, _, errors = inspect(capsys, tmp_path / "nowhere")
    assert status == 2 and "nowhere: got no such directory" in errors


def test_many_evaluations_are_thinned_out_but_for_the_best():
    evaluations = [{"step": i, "tau_16_nodes": float(i == 34)} for i in range(100)]
    report = RunReport(None, {}, None, [], evaluations, None, None, False)
    kept = [record["step"] for record in _thinned(evaluations, report.best)]
    assert kept[0] == 0 and kept[-1] == 99 and 34 in kept and len(kept) == MAX_EVALUATIONS + 1


def test_smoothing_keeps_straight_lines_and_ends():
    assert smoothed([1.0, 2.0, 3.0, 4.0, 5.0], 4) == pytest.approx([1, 2, 3, 4, 5])
    assert smoothed([0.0, 3.0, 0.0, 0.0], 2) == pytest.approx([0, 1, 1, 0])
    assert smoothed([7.0], 1) == [7.0]
