"""Prompt files: what is read, and one line with file and number for what cannot be."""

from __future__ import annotations

import pytest

from medusa.infer.prompts import read_prompts


def test_records_are_read_in_order(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"id": 7, "category": "math", "turns": ["c"]}\n')
    first, second = read_prompts(path)
    assert (first.id, first.turns, first.category) == ("1", ["a", "b"], None)
    assert (second.id, second.turns, second.category) == ("7", ["c"], "math")
    assert [record.id for record in read_prompts(path, limit=1)] == ["1"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"turns": ["a"]}\nnot json\n', r"p.jsonl:2: not JSON"),
        (b'{"turns": []}\n', r'p.jsonl:1: expected "turns" to be a list'),
        (b'{"turns": [""]}\n', r"p.jsonl:1: expected"),
        (b'["a"]\n', r"p.jsonl:1: expected"),
        (b'{"id": "x", "turns": ["a"]}\n{"id": "x", "turns": ["b"]}\n', "has the id 'x' twice"),
        (b"\n\n", "holds no prompt"),
        (b'{"turns": ["\xff"]}\n', "is not UTF-8 text"),
    ],
)
def test_faults_name_the_line(tmp_path, content, message):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_missing_file_says_what_was_expected(tmp_path):
    with pytest.raises(ValueError, match="is no file; expected JSONL"):
        read_prompts(tmp_path / "none.jsonl")


def test_the_projects_own_prompts_are_good(repo_root):
    records = read_prompts(repo_root / "data" / "prompts.jsonl")
    assert len(records) == 24 and len({record.category for record in records}) == 8
    assert len({record.category for record in records[:8]}) == 8  # quickstart benchmarks the first eight
