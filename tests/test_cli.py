"""The program end to end on a tiny base: every command, its exit status, its one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from medusa.cli import run
from tiny_models import save_tiny_base


@dataclass
class Workspace:
    """A tiny base, data that it made, heads trained on that and their tree: what the commands leave to each other."""

    folder: Path

    @property
    def base(self) -> str:
        return str(self.folder / "base")

    @property
    def prompts(self) -> str:
        return str(self.folder / "prompts.jsonl")

    @property
    def data(self) -> str:
        return str(self.folder / "data.jsonl")

    @property
    def config(self) -> str:
        return str(self.folder / "train.yaml")

    @property
    def heads(self) -> str:
        return str(self.folder / "heads")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Made with the commands themselves, so a failure here is a failure of distill, train or calibrate."""
    work = Workspace(tmp_path_factory.mktemp("work"))
    save_tiny_base(work.base, vocab_size=100)
    prompts = [{"id": str(i), "category": "ab"[i % 2], "turns": [f"Tell me about number {i}."]} for i in range(12)]
    Path(work.prompts).write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    config = {
        "model": {"base": work.base},
        "heads": {"num_heads": 3, "draft_vocab_size": 64},
        "data": {"path": work.data, "holdout_fraction": 0.0},
        "optim": {"batch_size": 4, "epochs": 4},
        "train": {"output_dir": work.heads},
    }
    Path(work.config).write_text(yaml.safe_dump(config))
    distill = ["distill", "--base", work.base, "--out", work.data, "--prompts", work.prompts]
    assert run([*distill, "--max-new-tokens", "40"]) == 0
    assert run(["train", "--config", work.config, "optim.lr=5e-3"]) == 0
    assert run(["calibrate", "--heads", work.heads, "--data", work.data]) == 0
    return work


def test_distilled_data_are_the_answers_to_the_prompts(workspace):
    records = [json.loads(line) for line in Path(workspace.data).read_text().splitlines()]
    assert sorted(record["id"] for record in records) == sorted(str(i) for i in range(12))
    assert all(record["messages"][0]["content"] == f"Tell me about number {record['id']}." for record in records)
    assert all(len(record["answer_ids"]) == 40 for record in records)  # this base never ends an answer


def test_a_heads_directory_is_complete(workspace):
    heads = Path(workspace.heads)
    names = {str(path.relative_to(heads)) for path in heads.rglob("*") if path.is_file()}
    assert {"config.json", "heads.safetensors", "tree.json", "training/config.yaml", "training/metrics.jsonl"} <= names
    assert yaml.safe_load((heads / "training" / "config.yaml").read_text())["optim"]["lr"] == 5e-3
    tree = json.loads((heads / "tree.json").read_text())
    assert tree["machine"]["torch"] and len(tree["latency_curve"]) > 3


def test_inspect_data_shows_the_mask(workspace, capsys):
    assert run(["inspect", "data", "--data", workspace.data, "--base", workspace.base, "--limit", "1"]) == 0
    output = capsys.readouterr().out
    assert "⟦" in output and "conversations  12" in output


def test_inspect_heads_says_what_they_are(workspace, capsys):
    assert run(["inspect", "heads", "--heads", workspace.heads]) == 0
    output = capsys.readouterr().out
    assert workspace.base in output.replace("\n", "")
    assert "shared lm_head, 64 of 100 tokens" in output and "blocks.2.0.linear.weight" in output


def test_inspect_tree_draws_it(workspace, tmp_path, capsys):
    picture = tmp_path / "tree.png"
    assert run(["inspect", "tree", "--heads", workspace.heads, "--png", str(picture)]) == 0
    assert "root" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_eval_prints_and_writes_the_same_numbers(workspace, tmp_path, capsys):
    path = tmp_path / "eval.json"
    assert run(["eval", "--heads", workspace.heads, "--data", workspace.data, "--json", str(path)]) == 0
    output, report = capsys.readouterr().out, json.loads(path.read_text())
    assert f"{report['num_positions']:,} positions" in output
    assert f"{report['accuracy'][0]['top1']:.1%}" in output and f"{report['tau_tree']:.2f}" in output
    assert set(report["by_category"]) == {"a", "b"}
    assert sum(part["num_positions"] for part in report["by_category"].values()) == report["num_positions"]


def test_generate_says_what_the_base_says(workspace, capsys):
    answers = []
    for option in ("--speculate", "--no-speculate"):
        command = ["generate", "--heads", workspace.heads, "--prompt", "Hi", "--max-new-tokens", "30", option]
        assert run(command) == 0
        *answer, statistics = capsys.readouterr().out.rstrip("\n").split("\n")
        answers.append(answer)
        assert statistics.startswith("30 tokens in ")
    assert answers[0] == answers[1] and any(answers[0])


def test_a_seed_gives_the_same_sampled_answer_with_and_without_drafts(workspace, capsys):
    answers = []
    for seed, option in (("4", "--speculate"), ("4", "--no-speculate"), ("5", "--speculate")):
        command = ["generate", "--heads", workspace.heads, "--prompt", "Hi", "--max-new-tokens", "30", option]
        settings = "--temperature 0.9 --top-k 50 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.1"
        penalties = f"--presence-penalty 0.1 --frequency-penalty 0.1 --acceptance rejection --seed {seed}"
        assert run([*command, *settings.split(), *penalties.split()]) == 0
        *answer, _ = capsys.readouterr().out.rstrip("\n").split("\n")
        answers.append(answer)
    assert answers[0] == answers[1] != answers[2]


def test_typical_acceptance_says_that_it_is_lossy(workspace, capsys):
    command = ["generate", "--heads", workspace.heads, "--prompt", "Hi", "--max-new-tokens", "8"]
    assert run([*command, "--temperature", "0.7", "--acceptance", "typical", "--epsilon", "0.2"]) == 0
    assert "LOSSY: typical acceptance (epsilon 0.2, delta 0.3)" in capsys.readouterr().out
    assert run([*command, "--temperature", "0.7"]) == 0
    assert "LOSSY" not in capsys.readouterr().out


def test_bench_at_a_temperature_compares_answers_of_the_same_seed(workspace, tmp_path, capsys):
    path = tmp_path / "bench.json"
    command = ["bench", "--heads", workspace.heads, "--prompts", workspace.prompts, "--limit", "2"]
    settings = ["--temperature", "0.8", "--top-p", "0.95", "--max-new-tokens", "12", "--json", str(path)]
    assert run([*command, *settings]) == 0
    report = json.loads(path.read_text())
    assert report["sampling"]["temperature"] == 0.8 and report["sampling"]["seed"] == 0
    medusa = report["methods"]["medusa"]
    assert medusa["num_prompts_identical"] is None and sum(medusa["compared_with_ar"].values()) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert "temperature 0.8, top-p 0.95, seed 0" in output and "hf draws others from the same distribution" in output


def test_generate_compare_shows_three_speeds_and_one_answer(workspace, capsys):
    command = ["generate", "--heads", workspace.heads, "--prompt", "Hi", "--max-new-tokens", "20", "--compare"]
    assert run(command) == 0
    output = capsys.readouterr().out
    assert output.count("yes") == 3 and "NO" not in output and output.count("vs hf") == 1


def test_bench_writes_the_contract(workspace, tmp_path, capsys):
    path, picture = tmp_path / "out" / "bench.json", tmp_path / "bench.png"
    command = ["bench", "--heads", workspace.heads, "--prompts", workspace.prompts, "--limit", "4"]
    assert run([*command, "--max-new-tokens", "24", "--json", str(path), "--plot", str(picture)]) == 0
    report = json.loads(path.read_text())
    assert (report["num_prompts"], report["max_new_tokens"], report["dtype"]) == (4, 24, "float32")
    assert report["base_model"] == workspace.base and report["machine"]["cores"]
    assert {"1", "8"} <= set(report["latency_curve"])
    assert set(report["methods"]) == {"hf", "ar", "medusa"}
    for method in report["methods"].values():
        assert method["num_prompts_identical"] + method["num_prompts_tie"] == 4
        assert method["num_prompts_different"] == 0 and method["num_tokens"] == 96
        assert set(method["by_category"]) == {"a", "b"}
    assert report["methods"]["medusa"].keys() >= {
        "tokens_per_second",
        "mean_acceptance_length",
        "speedup_vs_hf",
        "speedup_vs_ar",
        "efficiency",
        "time_to_first_token_s",
    }
    assert report["methods"]["hf"]["mean_acceptance_length"] == report["methods"]["ar"]["mean_acceptance_length"] == 1
    assert report["methods"]["medusa"]["speedup_vs_hf"] == pytest.approx(
        report["methods"]["medusa"]["tokens_per_second"] / report["methods"]["hf"]["tokens_per_second"]
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, message",
    [
        ("frobnicate", "No such command 'frobnicate'"),
        ("inspect", "Missing command"),
        ("bench --heads {heads}", "Missing option '--prompts'"),
        ("bench --heads {heads} --prompts {prompts} --methods hf,vllm", "got vllm, expected some of hf, hf-lookup, ar"),
        ("bench --heads {heads} --prompts nowhere.jsonl", "nowhere.jsonl"),
        ("bench --heads {heads} --prompts {prompts} --max-new-tokens 1000", "prompt 0: request: "),
        ("generate --heads {base} --prompt x", "{base}"),
        ("generate --heads {heads} --prompt x --max-new-tokens 250", "lower max_new_tokens to"),
        ("generate --heads {heads} --prompt x --max-new-tokens many", "Invalid value for '--max-new-tokens'"),
        ("generate --heads {heads} --prompt x --compare --stop y", "got --compare with --stop"),
        ("generate --heads {heads} --prompt x --compare --temperature 1", "got --compare with sampling"),
        ("generate --heads {heads} --prompt x --top-p 0.9", "--top-p: got 0.9 with temperature 0, which is greedy"),
        ("generate --heads {heads} --prompt x --temperature -1", "temperature: got -1.0, expected 0 (greedy) or"),
        ("generate --heads {heads} --prompt x --temperature 1 --acceptance greedy", "got greedy with temperature 1.0"),
        ("generate --heads {heads} --prompt x --acceptance typical", "got typical with temperature 0"),
        ("generate --heads {heads} --prompt x --temperature 1 --delta 0.1", "--delta: belongs to --acceptance typical"),
        ("bench --heads {heads} --prompts {prompts} --top-p 0.9", "--top-p: got 0.9 with temperature 0"),
        ("generate --heads {heads} --prompt x --base nowhere/at-all", "nowhere/at-all"),
        ("generate --heads {heads} --prompt x --device warp", "device 'warp' is unknown"),
        ("generate --heads {heads} --prompt x --device cuda:99", "device 'cuda:99' is not there"),
        ("eval --heads {heads} --data {prompts}", "{prompts}:1"),
        ("calibrate --heads {heads} --data {data} --limit 1", "got 1 conversation(s), expected at least 2"),
        ("train --config {config} optim.lrr=1", "did you mean optim.lr?"),
        ("distill --base {base} --out {heads}", "exactly one of --prompts FILE and --self-prompt N"),
        ("inspect tree --heads nowhere", "nowhere: got no such directory"),
        ("inspect run nowhere", "nowhere: got no such directory"),
        ("inspect data --base {base} --data nowhere.jsonl", "nowhere.jsonl: got no such file"),
    ],
)
def test_wrong_usage_and_input_are_one_line_and_status_2(workspace, capsys, command, message):
    names = {name: getattr(workspace, name) for name in ("base", "prompts", "data", "config", "heads")}
    assert run(command.format(**names).split()) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[-1].startswith("error: ") and message.format(**names) in lines[-1]
    assert not any(line.startswith(("Traceback", "error:")) for line in lines[:-1])


def test_every_command_explains_itself(capsys):
    for command in (
        "",
        "distill",
        "train",
        "eval",
        "calibrate",
        "generate",
        "bench",
        "inspect",
        "inspect data",
        "inspect heads",
        "inspect tree",
        "inspect run",
    ):
        assert run([*command.split(), "--help"]) == 0
        assert "Usage: medusa" in capsys.readouterr().out
    assert run([]) == 0
    assert "Commands" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_traceback(workspace):
    command = f"{sys.executable} -m medusa inspect data --data {workspace.data} --base {workspace.base} --limit 12"
    done = subprocess.run(f"{command} | head -c 1", shell=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_a_missing_tree_is_a_warning_that_says_what_to_do(workspace, tmp_path, capsys):
    import shutil

    heads = shutil.copytree(workspace.heads, tmp_path / "heads")
    (heads / "tree.json").unlink()
    assert run(["generate", "--heads", str(heads), "--prompt", "Hi", "--max-new-tokens", "4"]) == 0
    assert "warning: " in (errors := capsys.readouterr().err) and "run `medusa calibrate`" in errors


def run_script(repo_root, name, *arguments):
    command = [sys.executable, str(repo_root / "scripts" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_script_that_compares_trees_of_one_size(workspace, repo_root, tmp_path):
    data = ["--fit", workspace.data, "--test", workspace.data]
    report = tmp_path / "trees.json"
    table = run_script(repo_root, "compare_trees", "--heads", workspace.heads, *data, "--nodes", "6", "--json", report)
    heads = json.loads(report.read_text())["heads"]["heads"]
    assert heads["num_positions"] > 300 and heads["design"] == "medusa" and "| heads" in table
    # Chosen and judged on the same text, so the static tree is the best that there can be.
    assert heads["chain"] > 1.0 and heads["static"] == heads["static, hindsight"]
    evaluated = tmp_path / "eval.json"
    assert run(["eval", "--heads", workspace.heads, "--data", workspace.data, "--json", str(evaluated)]) == 0
    assert heads["chain"] == pytest.approx(json.loads(evaluated.read_text())["tau_chain"])
    assert heads["static"] * 0.9 < heads["dynamic"] < 6


def test_the_script_that_compares_designs_and_trees(workspace, repo_root, tmp_path):
    report = tmp_path / "decoding.json"
    options = ["--prompts", workspace.prompts, "--limit", "2", "--max-new-tokens", "12", "--json", report]
    options += ["--plot", tmp_path / "decoding.png"]
    table = run_script(repo_root, "ablate_decoding", "--heads", workspace.heads, *options)
    found = json.loads(report.read_text())
    assert found["designs"] == {"heads": "medusa"} and (tmp_path / "decoding.png").stat().st_size > 10_000
    names = ["hf", "ar", "lookup", *(f"heads: medusa{kind}" for kind in ("-static", "-static-lookup", "-dynamic", ""))]
    assert list(found["methods"]) == names
    assert all(method["num_prompts_different"] == 0 for method in found["methods"].values())
    assert sum(line.replace(" ", "").startswith("|heads|medusa|") for line in table.splitlines()) == 4
