"""Several processes tokenise as one does: the same examples in the same order, and the same errors."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from medusa.train.conversation import read_records
from medusa.train.dataset import build_dataset
from medusa.train.tokenization import CHUNK_SIZE, tokenize
from tiny_models import SlowTokenizer

ANSWERS = 5 * CHUNK_SIZE // 2


def record(answer, **extra):
    return json.dumps(
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]} | extra
    )


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory):
    """Text and exact ids, with a bad record every hundred and one that cannot be masked."""
    lines = [record("word " * (1 + i % 9) + str(i), category=f"c{i % 2}") for i in range(ANSWERS)]
    lines[5::100] = ["{"] * len(lines[5::100])
    lines[7::50] = ['{"prompt_ids": [5, 6], "answer_ids": [7, 8, 2]}'] * len(lines[7::50])
    lines[11] = record("\ue000answer\ue001")
    path = tmp_path_factory.mktemp("mixed") / "mixed.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.loss_mask, b.loss_mask)
        assert a.category == b.category


def test_three_processes_give_what_one_gives(mixed_file, tokenizer):
    one, three = (build_dataset(mixed_file, tokenizer, 40, "skip", 600, num_workers=n) for n in (1, 3))
    same(one, three)
    assert one.fingerprint == three.fingerprint and one.statistics == three.statistics
    assert np.array_equal(one.lengths, three.lengths)
    assert one.statistics.skipped.keys() == {"broken JSON", "marker in the text"} and one.statistics.truncated > 0


def test_errors_come_where_they_are_in_the_data(mixed_file, tokenizer):
    """With a limit too: what lies behind it is neither counted nor complained about."""
    for workers in (1, 2):
        with pytest.raises(ValueError, match=r"mixed\.jsonl:6: got broken JSON"):
            build_dataset(mixed_file, tokenizer, 40, num_workers=workers)
    assert len(build_dataset(mixed_file, tokenizer, 40, limit=5)) == 5
    skipping = build_dataset(mixed_file, tokenizer, 40, "skip", limit=300)
    assert skipping.statistics.skipped == {"broken JSON": 3, "marker in the text": 1} and len(skipping) == 300


def test_a_tokenizer_that_cannot_mask_is_refused_from_a_worker_too(mixed_file, tokenizer):
    with pytest.raises(ValueError, match="SlowTokenizer without character offsets"):
        build_dataset(mixed_file, SlowTokenizer(), 40, num_workers=2)


class Deadly:
    """A tokenizer that ends the process that is given it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_worker_that_dies_is_one_clear_line(mixed_file):
    with pytest.raises(RuntimeError, match=r"a tokenising process died.* set data\.num_workers lower"):
        build_dataset(mixed_file, Deadly(), 40, num_workers=2)


def test_a_file_that_breaks_off_is_an_error_after_what_came_before(tmp_path, tokenizer):
    import gzip

    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(record(f"answer {i}") for i in range(2000)).encode())[:-2000])
    records = tokenize(read_records([str(path)]), tokenizer)
    seen = 0
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz: got EOFError .* expected a readable, complete file"):
        for _ in records:
            seen += 1
    assert seen > 0


def test_a_limit_reads_little_more(tokenizer):
    def endless():
        for number, found in read_records(["a"]):
            taken.append(number)
            yield number, found

    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.train.conversation.check_source", lambda source: None)
        patch.setattr(
            "medusa.train.conversation._hub_records",
            lambda *_: ((f"a:{i}", record("x").encode()) for i in range(10**9)),
        )
        results = tokenize(endless(), tokenizer, limit=3)
        assert [next(results).source for _ in range(3)] == [0, 0, 0]
        results.close()
    assert len(taken) == 3
