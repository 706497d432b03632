"""From files to examples: what is kept, cut, counted; which tokens heads should know."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from medusa.train.batching import Example
from medusa.train.data_statistics import DataStatistics
from medusa.train.dataset import NO_LABELS, build_dataset, frequent_tokens, token_coverage

END = 2  # <|im_end|> of the tiny tokenizer


def record(question: str, answer: str, **extra: str) -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **extra}


@pytest.fixture
def write(tmp_path):
    def write_lines(*records, name="data.jsonl"):
        lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    return write_lines


def labels(tokenizer, example: Example) -> str:
    return tokenizer.decode(example.input_ids[example.loss_mask])


def test_examples_keep_order_and_category_across_chunks(write, tokenizer):
    source = write(*(record("hi", f"answer {i}", category=f"c{i % 3}") for i in range(600)))
    dataset = build_dataset(source, tokenizer, 512)
    assert len(dataset) == 600 and dataset.statistics.conversations == 600
    assert [labels(tokenizer, dataset[i]) for i in (0, 255, 256, 599)] == [
        f"answer {i}<|im_end|>" for i in (0, 255, 256, 599)
    ]
    assert [example.category for example in dataset][:4] == ["c0", "c1", "c2", "c0"]
    assert dataset.lengths.tolist() == [len(example) for example in dataset]


def test_exact_ids_are_used_as_they_are_and_need_no_template(write, tokenizer):
    ids = {"prompt_ids": [1, 9, 9], "answer_ids": [7, 8, END], "category": "made"}
    from_text = record("hi", "ok")
    dataset = build_dataset(write(ids, from_text, ids), tokenizer, 512)
    for example in (dataset[0], dataset[2]):
        assert example.input_ids.tolist() == [1, 9, 9, 7, 8, END]
        assert example.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert labels(tokenizer, dataset[1]) == "ok<|im_end|>"

    class NoTemplate:
        __len__ = tokenizer.__len__

    assert len(build_dataset(write(ids, ids), NoTemplate(), 512)) == 2
    with pytest.raises(ValueError, match="NoTemplate without character offsets"):
        build_dataset(write(from_text), NoTemplate(), 512)


def test_ids_of_another_tokenizer_are_refused(write, tokenizer):
    source = write({"prompt_ids": [1], "answer_ids": [len(tokenizer)]})
    with pytest.raises(ValueError, match=rf"data.jsonl:1: got token id {len(tokenizer)}, expected ids below"):
        build_dataset(source, tokenizer, 512)


def test_truncation_is_from_the_right_and_counted(write, tokenizer):
    long = {"prompt_ids": [9] * 6, "answer_ids": list(range(10, 20))}
    only_prompt = {"prompt_ids": [9] * 8, "answer_ids": [10]}
    exactly = {"prompt_ids": [9] * 6, "answer_ids": [10, END]}
    source = write(long, only_prompt, exactly)
    dataset = build_dataset(source, tokenizer, max_length=8)
    assert [example.input_ids.tolist() for example in dataset] == [[9] * 6 + [10, 11], [9] * 6 + [10, END]]
    statistics = dataset.statistics
    assert statistics.to_dict() == {
        "conversations": 2,
        "tokens": 16,
        "loss_tokens": 4,
        "longest": 8,
        "truncated": 1,
        "truncated_tokens": 8,
        "loss_share": 0.25,
        "skipped": {NO_LABELS: 1},
        "sources": [{"path": source, "weight": 1.0, "conversations": 2, "tokens": 16}],
    }


def test_skipping_counts_reasons_of_reading_and_of_masking(write, tokenizer):
    too_large = {"prompt_ids": [1], "answer_ids": [10_000]}
    source = write(record("hi", "ok"), "{", too_large, record("hi", ""), record("hi", "\ue000answer\ue001"))
    dataset = build_dataset(source, tokenizer, 512, "skip")
    assert len(dataset) == 1
    reasons = {"broken JSON": 1, "ids of another tokenizer": 1, "empty answer": 1, "marker in the text": 1}
    assert dataset.statistics.skipped == reasons


def test_masking_errors_say_file_and_line(write, tokenizer):
    with pytest.raises(ValueError, match=r"data.jsonl:2: got .*answer.* expected ordinary text"):
        build_dataset(write(record("hi", "ok"), record("hi", "\ue000answer\ue001")), tokenizer, 512)


def test_nothing_left_is_an_error_with_the_reasons(write, tokenizer):
    too_large = {"prompt_ids": [1], "answer_ids": [10_000]}
    with pytest.raises(ValueError, match="skipped 2 ids of another tokenizer.*the first: .*data.jsonl:1: got token id"):
        build_dataset(write(too_large, too_large), tokenizer, 512, "skip")
    with pytest.raises(ValueError, match="data.max_length is 1, expected at least 2"):
        build_dataset(write(record("hi", "ok")), tokenizer, 1)


def test_limit_stops_early_and_progress_shows_only_on_a_terminal(write, tokenizer):
    source = write(record("hi", "ok"), record("hi", "ok"), *["{"] * 300)
    assert len(build_dataset(source, tokenizer, 512, "skip", limit=2)) == 2
    for is_terminal in (True, False):
        console = Console(record=True, force_terminal=is_terminal)
        with console.capture() as capture:
            build_dataset(source, tokenizer, 512, "skip", console=console)
        assert ("Tokenising" in capture.get()) == is_terminal


def test_statistics_at_a_glance():
    statistics = DataStatistics(1500, 100_000, 25_000, 512, 3, 4321)
    statistics.skipped.update({"broken JSON": 1, "empty answer": 12})
    assert str(statistics).splitlines() == [
        "conversations  1,500",
        "tokens         100,000 (mean 67, longest 512)",
        "under loss     25,000 (25.0%)",
        "truncated      3 (4,321 tokens cut)",
        "skipped        13",
        "               12 empty answer",
        "               1 broken JSON",
    ]
    assert "skipped        0" in str(DataStatistics())


# ---- tokens that heads should know


def example(prompt: list[int], answer: list[int]) -> Example:
    mask = torch.arange(len(prompt) + len(answer)) >= len(prompt)
    return Example(torch.tensor(prompt + answer), mask)


EXAMPLES = [example([9] * 5, [4, 4, 4, 7]), example([9], [7, 5, 8])]


def test_frequent_tokens_count_only_labels_ties_by_id():
    assert frequent_tokens(EXAMPLES, 2, 10).tolist() == [4, 7]
    assert frequent_tokens(EXAMPLES, 3, 10).tolist() == [4, 5, 7]
    assert frequent_tokens(EXAMPLES, 3, 10).dtype == torch.int64


def test_frequent_tokens_hold_required_ids_and_fill_up_with_the_lowest():
    assert frequent_tokens(EXAMPLES, 2, 10, required=[9]).tolist() == [4, 9]
    assert frequent_tokens(EXAMPLES, 6, 10).tolist() == [0, 1, 4, 5, 7, 8]
    assert frequent_tokens(EXAMPLES, 10, 10).tolist() == list(range(10))
    assert frequent_tokens(EXAMPLES, 500, 50_000).tolist() == list(range(500))


def test_frequent_tokens_refuse_impossible_sizes_and_foreign_ids():
    for size in (0, 11):
        with pytest.raises(ValueError, match=f"draft vocabulary of {size} tokens, expected 1 to .* 10"):
            frequent_tokens(EXAMPLES, size, 10)
    with pytest.raises(ValueError, match="expected 2 to"):
        frequent_tokens(EXAMPLES, 1, 10, required=[1, 2])
    with pytest.raises(ValueError, match="got token id 8 in the data, expected ids below .* 8"):
        frequent_tokens(EXAMPLES, 2, 8)


def test_coverage_is_over_labels():
    assert token_coverage(EXAMPLES, torch.tensor([4, 7])) == pytest.approx(5 / 7)
    assert token_coverage(EXAMPLES, frequent_tokens(EXAMPLES, 10, 10)) == 1.0
    assert token_coverage([], torch.tensor([4])) == 0.0
