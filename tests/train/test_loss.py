"""The chunked loss against the obvious one: values, gradients, counts, and how much it holds at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.train.loss import (
    IGNORE_INDEX,
    LABELS,
    NLL,
    OUTSIDE_INDEX,
    TARGETS,
    TOP1,
    TOP5,
    accumulate_gradients,
    draft_index,
    gather_labels,
    head_weights,
    label_positions,
)

D, V, DRAFT, K = 12, 50, 20, 3
WEIGHTS = [1.0, 0.8, 0.64]


def make_heads(lm_head="shared", dtype=torch.float64, num_heads=K):
    heads = MedusaHeads(HeadsConfig(num_heads, 2, D, V, lm_head, DRAFT), torch.arange(0, 2 * DRAFT, 2)).to(dtype)
    heads.init_from_lm_head(torch.randn(V, D, dtype=dtype))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def make_pairs(n=23, dtype=torch.float64):
    labels = torch.randint(0, DRAFT, (n, K))
    labels[torch.rand(n, K) < 0.2] = IGNORE_INDEX
    labels[torch.rand(n, K) < 0.1] = OUTSIDE_INDEX
    return torch.randn(n, D, dtype=dtype), labels


def reference(heads, hidden, labels):
    """All logits at once, stock cross-entropy."""
    logits = heads(hidden)
    ignored = labels.clamp(min=-1).masked_fill(labels < 0, IGNORE_INDEX)
    losses = [F.cross_entropy(logits[k], ignored[:, k], reduction="sum", ignore_index=IGNORE_INDEX) for k in range(K)]
    sum(w * loss for w, loss in zip(WEIGHTS, losses, strict=True)).backward()
    return torch.stack(losses).detach(), logits.detach()


# ---- which token is whose label


def test_head_k_is_scored_against_the_token_k_plus_2_ahead():
    input_ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 0, 0]])
    loss_mask = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]).bool()
    reached = label_positions(loss_mask, 3)
    # Position 0 of the first row is far inside the prompt: only head 1 reaches the answer from there.
    assert reached.tolist() == [[True, True, True, True, False, False], [True, True, False, False, False, False]]
    labels = gather_labels(input_ids, loss_mask, 3, torch.arange(30))
    x = IGNORE_INDEX
    assert labels.tolist() == [[x, 13, 14], [13, 14, 15], [14, 15, x], [15, x, x], [22, 23, x], [23, x, x]]


def test_labels_against_loops():
    input_ids, loss_mask = torch.randint(0, V, (4, 17)), torch.rand(4, 17) < 0.4
    index = draft_index(torch.arange(0, 2 * DRAFT, 2), V)
    expected = []
    for row in range(4):
        for t in range(17):
            targets = [t + k + 2 for k in range(K)]
            known = [s < 17 and bool(loss_mask[row, s]) for s in targets]
            if any(known):
                pairs = zip(targets, known, strict=True)
                expected.append([int(index[input_ids[row, s]]) if ok else IGNORE_INDEX for s, ok in pairs])
    assert gather_labels(input_ids, loss_mask, K, index).tolist() == expected


@pytest.mark.parametrize("width", [0, 1, 2, 3])
def test_rows_too_short_for_the_heads_have_no_labels_beyond_their_end(width):
    labels = gather_labels(torch.ones(2, width, dtype=torch.int64), torch.ones(2, width).bool(), K, torch.arange(V))
    assert labels.shape == (2 * max(width - 2, 0), K) and (labels[:, 1:] == IGNORE_INDEX).all()


def test_draft_index_marks_what_is_outside():
    assert draft_index(torch.tensor([1, 3]), 5).tolist() == [OUTSIDE_INDEX, 0, OUTSIDE_INDEX, 1, OUTSIDE_INDEX]
    assert draft_index(None, 4).tolist() == [0, 1, 2, 3]


def test_head_weights_decay_as_in_the_paper():
    assert head_weights(3, 0.8) == pytest.approx([1.0, 0.8, 0.64])


# ---- values and gradients


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-6)])
def test_values_and_gradients_are_those_of_the_obvious_loss(lm_head, chunk_size, dtype, tolerance):
    heads, (hidden, labels) = make_heads(lm_head, dtype), make_pairs(dtype=dtype)
    losses, _ = reference(heads, hidden, labels)
    expected = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad(set_to_none=True)
    sums = accumulate_gradients(heads, hidden, labels, WEIGHTS, chunk_size)
    torch.testing.assert_close(sums[:, NLL], losses.double(), rtol=tolerance, atol=0)
    for parameter, grad in zip(heads.parameters(), expected, strict=True):
        scale = grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=tolerance * scale)


def test_bfloat16_products_stay_near_and_master_weights_stay_float32():
    heads, (hidden, labels) = make_heads("own", torch.float32), make_pairs(dtype=torch.float32)
    losses, _ = reference(heads, hidden, labels)
    expected = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad(set_to_none=True)
    sums = accumulate_gradients(heads, hidden.bfloat16(), labels, WEIGHTS, 8, torch.bfloat16)
    torch.testing.assert_close(sums[:, NLL], losses.double(), rtol=0.02, atol=0)
    for parameter, grad in zip(heads.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - grad).norm() < 0.05 * grad.norm()


def test_large_logits_do_not_overflow():
    heads, (hidden, labels) = make_heads(dtype=torch.float32), make_pairs(dtype=torch.float32)
    sums = accumulate_gradients(heads, hidden * 1e4, labels, WEIGHTS, 8)
    assert sums.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in heads.parameters())


def test_gradients_add_up_over_calls():
    heads, (hidden, labels) = make_heads(), make_pairs()
    whole = accumulate_gradients(heads, hidden, labels, WEIGHTS, 8)
    expected = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad(set_to_none=True)
    parts = [accumulate_gradients(heads, hidden[s], labels[s], WEIGHTS, 8) for s in (slice(0, 9), slice(9, None))]
    torch.testing.assert_close(sum(parts), whole)
    for parameter, grad in zip(heads.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


# ---- counts


def test_counts_and_accuracy():
    heads, (hidden, labels) = make_heads(), make_pairs(200)
    _, logits = reference(heads, hidden, labels)
    with torch.no_grad():
        sums = accumulate_gradients(heads, hidden, labels, WEIGHTS, 64)
    for k in range(K):
        hits = logits[k].topk(5).indices == labels[:, k, None]
        assert sums[k, TOP1] == hits[:, 0].sum() and sums[k, TOP5] == hits.any(dim=1).sum()
        assert sums[k, LABELS] == (labels[:, k] >= 0).sum()
        assert sums[k, TARGETS] == (labels[:, k] != IGNORE_INDEX).sum() > sums[k, LABELS]


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_without_gradients_the_sums_are_the_same_and_none_are_made(lm_head):
    heads, (hidden, labels) = make_heads(lm_head), make_pairs()
    expected = accumulate_gradients(heads, hidden, labels, WEIGHTS, 8)
    heads.zero_grad(set_to_none=True)
    with torch.no_grad():
        assert torch.equal(accumulate_gradients(heads, hidden, labels, WEIGHTS, 8), expected)
    assert all(parameter.grad is None for parameter in heads.parameters())


@pytest.mark.parametrize("n", [0, 4])
def test_no_labels_make_zeros_not_nan(n):
    heads = make_heads()
    labels = torch.full((n, K), IGNORE_INDEX)
    assert accumulate_gradients(heads, torch.randn(n, D, dtype=torch.float64), labels, WEIGHTS, 8).eq(0).all()


# ---- memory


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_nothing_larger_than_a_chunk_of_logits_is_ever_made():
    heads, (hidden, labels) = make_heads(num_heads=K), make_pairs(100)
    chunk = 32
    with LargestTensor() as largest:
        accumulate_gradients(heads, hidden, labels, WEIGHTS, chunk)
    assert largest.numel <= max(chunk * DRAFT, 100 * D)
    with LargestTensor() as control:
        reference(heads, hidden, labels)
    assert control.numel >= 100 * DRAFT * K
