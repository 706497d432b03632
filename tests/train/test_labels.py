"""Which token is whose label, and whose teacher."""

from __future__ import annotations

import pytest
import torch

from medusa.base_model import BaseModel
from medusa.train.labels import IGNORE_INDEX, OUTSIDE_INDEX, draft_index, gather_labels, label_positions
from medusa.train.targets import Teacher, teacher_rows
from tiny_models import tiny_model, tiny_tokenizer

V, DRAFT, K = 50, 20, 3


def test_head_k_is_scored_against_the_token_k_plus_2_ahead():
    input_ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 0, 0]])
    loss_mask = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]).bool()
    reached = label_positions(loss_mask, 3)
    # Position 0 of the first row is far inside the prompt: only head 1 reaches the answer from there. The last but one
    # position of an answer is nobody's, but says what the base expects as its last token.
    assert reached.tolist() == [[True, True, True, True, True, False], [True, True, True, False, False, False]]
    labels = gather_labels(input_ids, loss_mask, 3, torch.arange(30))
    x = IGNORE_INDEX
    assert labels.tolist() == [
        [x, 13, 14],
        [13, 14, 15],
        [14, 15, x],
        [15, x, x],
        [x, x, x],
        [22, 23, x],
        [23, x, x],
        [x, x, x],
    ]


def test_labels_against_loops():
    input_ids, loss_mask = torch.randint(0, V, (4, 17)), torch.rand(4, 17) < 0.4
    index = draft_index(torch.arange(0, 2 * DRAFT, 2), V)
    expected = []
    for row in range(4):
        for t in range(17):
            targets = [t + k + 2 for k in range(K)]
            known = [s < 17 and bool(loss_mask[row, s]) for s in targets]
            if any(known) or (t + 1 < 17 and bool(loss_mask[row, t + 1])):
                pairs = zip(targets, known, strict=True)
                expected.append([int(index[input_ids[row, s]]) if ok else IGNORE_INDEX for s, ok in pairs])
    assert gather_labels(input_ids, loss_mask, K, index).tolist() == expected


@pytest.mark.parametrize("width", [0, 1, 2, 3])
def test_rows_too_short_for_the_heads_have_no_labels_beyond_their_end(width):
    labels = gather_labels(torch.ones(2, width, dtype=torch.int64), torch.ones(2, width).bool(), K, torch.arange(V))
    assert labels.shape == (2 * max(width - 1, 0), K) and (labels[:, 1:] == IGNORE_INDEX).all()


def test_draft_index_marks_what_is_outside():
    assert draft_index(torch.tensor([1, 3]), 5).tolist() == [OUTSIDE_INDEX, 0, OUTSIDE_INDEX, 1, OUTSIDE_INDEX]
    assert draft_index(None, 4).tolist() == [0, 1, 2, 3]


# ---- the base as a teacher


def test_the_teacher_of_a_label_is_the_state_just_before_it():
    loss_mask = torch.rand(4, 17) < 0.4
    places = label_positions(loss_mask, K).nonzero().tolist()
    rows = teacher_rows(loss_mask, K)
    assert len(rows) == len(places)
    for (row, t), teachers in zip(places, rows.tolist(), strict=True):
        for k, teacher in enumerate(teachers):
            if t + k + 2 < 17 and loss_mask[row, t + k + 2]:
                assert places[teacher] == [row, t + k + 1]
            else:
                assert teacher == IGNORE_INDEX


@pytest.mark.parametrize("width", [0, 1, 2, 3])
def test_rows_too_short_for_the_heads_have_no_teacher_beyond_their_end(width):
    rows = teacher_rows(torch.ones(2, width).bool(), K)
    assert rows.shape == (2 * max(width - 1, 0), K) and (rows[:, 1:] == IGNORE_INDEX).all()


def test_labels_and_teachers_are_known_for_the_same_pairs():
    input_ids, loss_mask = torch.randint(0, V, (4, 17)), torch.rand(4, 17) < 0.4
    labels = gather_labels(input_ids, loss_mask, K, torch.arange(V))
    assert torch.equal(labels == IGNORE_INDEX, teacher_rows(loss_mask, K) == IGNORE_INDEX)


@pytest.mark.parametrize("num_tokens, chunk_size", [(4, 3), (1, 100), (1000, 7)])
def test_targets_are_the_bases_likeliest_tokens_in_proportion(num_tokens, chunk_size):
    base = BaseModel(tiny_model("gemma2"), tiny_tokenizer(), "tiny")  # a family that caps its logits
    ids, hidden = torch.arange(3, 43, 2), torch.randn(11, base.hidden_size)
    teacher = Teacher(base.lm_head_weight[ids], None, base.finish_logits, num_tokens)
    targets = teacher.targets(hidden, chunk_size)
    probs = base.logits(hidden)[:, ids].softmax(-1)
    best = probs.topk(min(num_tokens, len(ids)), dim=-1)
    dense = torch.zeros_like(probs).scatter(1, targets.ids, targets.probs)
    expected = torch.zeros_like(probs).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    torch.testing.assert_close(dense, expected)
