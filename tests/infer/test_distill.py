"""Data made by the base: exact, resumable after a kill, no record lost or doubled."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from medusa.base_model import load_base_model
from medusa.infer.distill import DistillOptions, distill, user_opening
from medusa.infer.generation import encode_prompt
from tiny_models import save_tiny_base, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat
QUIET = Console(quiet=True)
OPTIONS = DistillOptions(max_new_tokens=12, max_prompt_tokens=20, max_rows=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_base_model(str(save_tiny_base(tmp_path_factory.mktemp("base"), vocab_size=100)))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{n}", "category": "c", "turns": [f"Say {n}"]} for n in range(30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path):
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_records_hold_the_exact_tokens(base, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    result = distill(base, out, prompts=prompts, options=OPTIONS, console=QUIET)
    records = read(out)
    assert result.num_records == len(records) == 30 and result.num_resumed == 0
    assert result.num_answer_tokens == sum(len(record["answer_ids"]) for record in records.values())
    for name, record in records.items():
        assert record["prompt_ids"] == encode_prompt(base.tokenizer, f"Say {name[1:]}")
        prompt = torch.tensor([record["prompt_ids"]])
        ids = base.model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=2)[0, prompt.shape[1] :]
        ids = ids.tolist()
        assert record["answer_ids"] == ids and record["category"] == "c"
        assert record["finish_reason"] == ("stop" if ids[-1] == 2 else "length")
        text = base.tokenizer.decode(ids, skip_special_tokens=True)
        assert [message["content"] for message in record["messages"]] == [f"Say {name[1:]}", text]


def test_a_second_run_only_does_what_is_missing(base, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    distill(base, out, prompts=prompts, options=OPTIONS, console=QUIET)
    whole = out.read_text()
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:11]) + lines[11][:40])  # what a kill leaves: a line cut short
    result = distill(base, out, prompts=prompts, options=OPTIONS, console=QUIET)
    assert result.num_resumed == 11 and out.read_text().startswith("".join(lines[:11]))
    assert read(out) == {record["id"]: record for record in map(json.loads, lines)}
    assert len(out.read_text().splitlines()) == 30


def test_after_a_real_kill_nothing_is_lost_or_doubled(base, prompts, tmp_path):
    out, expected = tmp_path / "out.jsonl", tmp_path / "expected.jsonl"
    command = [sys.executable, "-m", "medusa", "distill", "--base", base.name, "--prompts", str(prompts)]
    command += ["--out", str(out), "--max-new-tokens", "200", "--max-rows", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = out.read_bytes().count(b"\n")
    assert 3 <= done < 30
    options = DistillOptions(max_new_tokens=200, max_rows=2)
    assert distill(base, out, prompts=prompts, options=options, console=QUIET).num_resumed == done
    distill(base, expected, prompts=prompts, options=options, console=QUIET)
    assert read(out) == read(expected) and len(out.read_text().splitlines()) == 30


def test_prompts_that_the_base_writes_are_the_same_after_a_kill(base, tmp_path):
    straight, killed = tmp_path / "straight.jsonl", tmp_path / "killed.jsonl"
    ending = dataclasses.replace(base)
    ending.__dict__["eos_token_ids"] = frozenset(range(5, 30))  # a random base hardly ever ends by itself
    distill(ending, straight, self_prompt=15, options=OPTIONS, console=QUIET)
    prompts = tmp_path / "straight.jsonl.prompts"
    lines = prompts.read_text().splitlines(keepends=True)
    assert len(lines) == 15 == len({json.loads(line)["turns"][0] for line in lines})
    (tmp_path / "killed.jsonl.prompts").write_text("".join(lines[:6]) + lines[6][:9])
    distill(ending, killed, self_prompt=15, options=OPTIONS, console=QUIET)
    assert (tmp_path / "killed.jsonl.prompts").read_text() == prompts.read_text()
    assert read(killed) == read(straight)


def test_the_opening_is_the_template_up_to_the_users_words():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(user_opening(tokenizer)) == "<|im_start|>user\n"
    with pytest.raises(ValueError, match="drops the user's words; give --prompts"):
        user_opening(tiny_tokenizer(chat_template="nothing"))


@pytest.mark.parametrize("given", [{}, {"prompts": "p", "self_prompt": 3}])
def test_exactly_one_source_of_prompts(base, tmp_path, given):
    with pytest.raises(ValueError, match="exactly one of --prompts FILE and --self-prompt N"):
        distill(base, tmp_path / "out.jsonl", options=OPTIONS, console=QUIET, **given)


def test_a_file_of_something_else_is_left_alone(base, prompts, tmp_path):
    out = tmp_path / "notes.txt"
    for notes in ("my notes\n", "my notes", '{"id": "p0"}\nand more'):
        out.write_text(notes)
        with pytest.raises(ValueError, match="holds something else than this command's records"):
            distill(base, out, prompts=prompts, options=OPTIONS, console=QUIET)
        assert out.read_text() == notes
