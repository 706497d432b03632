"""The chunked loss against the obvious one: values, gradients, counts, and how much it holds at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from medusa import conditioned_heads
from medusa.acceptance_statistics import true_ranks
from medusa.config import HeadsConfig
from medusa.train.labels import IGNORE_INDEX, OUTSIDE_INDEX
from medusa.train.loss import (
    LABELS,
    LOSS,
    TARGETS,
    TOP1,
    TOP5,
    TOP10,
    LossSettings,
    accumulate_gradients,
    head_weights,
)
from medusa.train.objectives import OBJECTIVES
from medusa.train.targets import Targets

D, V, DRAFT, K = 12, 50, 20, 3
WEIGHTS = [1.0, 0.8, 0.64]


def score(heads, hidden, labels, *rest):
    return accumulate_gradients(heads, hidden, make_prefix(labels), labels, *rest).sums


def make_prefix(labels):
    """The same for the same labels, whatever random numbers were drawn meanwhile."""
    return torch.randint(0, V, labels.shape, generator=torch.Generator().manual_seed(len(labels)))


def make_heads(lm_head="shared", dtype=torch.float64, num_heads=K, design="medusa", fused=()):
    config = HeadsConfig(num_heads, 2, D, V, lm_head, DRAFT, design, 5 if design == "markov" else None, fused)
    heads = conditioned_heads.make_heads(config, torch.arange(0, 2 * DRAFT, 2)).to(dtype)
    heads.init_from_base(*[torch.randn(V, D, dtype=dtype)] * 2)
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
    logits = heads(heads.fuse(hidden), make_prefix(labels))
    ignored = labels.clamp(min=-1).masked_fill(labels < 0, IGNORE_INDEX)
    losses = [F.cross_entropy(logits[k], ignored[:, k], reduction="sum", ignore_index=IGNORE_INDEX) for k in range(K)]
    sum(w * loss for w, loss in zip(WEIGHTS, losses, strict=True)).backward()
    return torch.stack(losses).detach(), logits.detach()


def test_head_weights_decay_as_in_the_paper():
    assert head_weights(3, 0.8) == pytest.approx([1.0, 0.8, 0.64])


# ---- values and gradients


@pytest.mark.parametrize("design", conditioned_heads.DESIGNS)
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-6)])
def test_values_and_gradients_are_those_of_the_obvious_loss(design, lm_head, chunk_size, dtype, tolerance):
    heads, (hidden, labels) = make_heads(lm_head, dtype, design=design), make_pairs(dtype=dtype)
    losses, _ = reference(heads, hidden, labels)
    expected = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad(set_to_none=True)
    sums = score(heads, hidden, labels, LossSettings(WEIGHTS, chunk_size))
    torch.testing.assert_close(sums[:, LOSS], losses.double(), rtol=tolerance, atol=0)
    for parameter, grad in zip(heads.parameters(), expected, strict=True):
        scale = grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("wants_hidden", [False, True])
def test_heads_on_fused_layers_learn_as_by_the_obvious_loss(wants_hidden):
    """The fusion gets the gradients of all heads; so do the states, where an adapted base wants them."""
    heads, labels = make_heads(design="hydra", fused=(2, 5)), make_pairs()[1]
    hidden = torch.randn(len(labels), 3 * D, dtype=torch.float64, requires_grad=wants_hidden)
    parameters = [*heads.parameters(), *([hidden] if wants_hidden else [])]
    losses, _ = reference(heads, hidden, labels)
    expected = [parameter.grad.clone() for parameter in parameters]
    assert heads.fusion.weight.grad.abs().max() > 0
    for parameter in parameters:
        parameter.grad = None
    sums = score(heads, hidden, labels, LossSettings(WEIGHTS, 8))
    torch.testing.assert_close(sums[:, LOSS], losses.double(), rtol=1e-10, atol=0)
    for parameter, grad in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_bfloat16_products_stay_near_and_master_weights_stay_float32():
    heads, (hidden, labels) = make_heads("own", torch.float32), make_pairs(dtype=torch.float32)
    losses, _ = reference(heads, hidden, labels)
    expected = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad(set_to_none=True)
    sums = score(heads, hidden.bfloat16(), labels, LossSettings(WEIGHTS, 8, compute_dtype=torch.bfloat16))
    torch.testing.assert_close(sums[:, LOSS], losses.double(), rtol=0.02, atol=0)
    for parameter, grad in zip(heads.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - grad).norm() < 0.05 * grad.norm()


def test_large_logits_do_not_overflow():
    heads, (hidden, labels) = make_heads(dtype=torch.float32), make_pairs(dtype=torch.float32)
    sums = score(heads, hidden * 1e4, labels, LossSettings(WEIGHTS, 8))
    assert sums.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in heads.parameters())


def test_gradients_add_up_over_calls():
    heads, (hidden, labels) = make_heads(), make_pairs()
    whole = score(heads, hidden, labels, LossSettings(WEIGHTS, 8))
    expected = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad(set_to_none=True)
    parts = [score(heads, hidden[s], labels[s], LossSettings(WEIGHTS, 8)) for s in (slice(0, 9), slice(9, None))]
    torch.testing.assert_close(sum(parts), whole)
    for parameter, grad in zip(heads.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


# ---- towards the base's distribution


def make_teacher(n=23, m=4, dtype=torch.float64):
    """Targets of n positions, and which of them teaches which row and head."""
    ids = torch.stack([torch.randperm(DRAFT)[:m] for _ in range(n)])
    return Targets(ids, torch.randn(n, m, dtype=dtype).mul(2).softmax(-1)), torch.randint(0, n, (n, K))


def slow_objective(name, probs, log_probs):
    """Over the whole draft vocabulary, from the definitions; autograd does the rest. probs, log_probs: [n, V]."""
    alpha = torch.minimum(probs, log_probs.exp()).sum(-1)
    if name == "distillation":
        return -(probs * log_probs).sum(-1)
    if name == "lk_log":
        return -alpha.log()
    blend = torch.exp(-3 * alpha.detach())
    return blend * F.kl_div(log_probs, probs, reduction="none").sum(-1) + (1 - blend) * (1 - alpha)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("name", ["distillation", "lk_hybrid", "lk_log"])
@pytest.mark.parametrize("chunk_size", [5, 1000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_objectives_against_the_definitions_over_the_whole_vocabulary(name, lm_head, chunk_size, dtype, tolerance):
    heads, (hidden, labels), (targets, rows) = make_heads(lm_head, dtype), make_pairs(dtype=dtype), make_teacher()
    logits, losses = heads(hidden), []
    for k in range(K):
        known = labels[:, k] >= 0
        own = targets[rows[known, k]]
        dense = torch.zeros(len(own.ids), DRAFT, dtype=torch.float64).scatter(1, own.ids, own.probs).to(dtype)
        losses.append(slow_objective(name, dense, logits[k, known].log_softmax(-1)).sum())
    sum(w * loss for w, loss in zip(WEIGHTS, losses, strict=True)).backward()
    expected = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad(set_to_none=True)
    settings = LossSettings(WEIGHTS, chunk_size, OBJECTIVES[name])
    sums = score(heads, hidden, labels, settings, (targets, rows))
    torch.testing.assert_close(sums[:, LOSS], torch.stack(losses).detach().double(), rtol=tolerance, atol=0)
    for parameter, grad in zip(heads.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=tolerance * grad.abs().max().item())


def test_one_hot_targets_are_the_labels():
    heads, (hidden, labels) = make_heads(), make_pairs()
    expected = score(heads, hidden, labels, LossSettings(WEIGHTS, 8))
    flat = Targets.one_hot(labels.clamp(min=0).flatten())
    rows = torch.arange(labels.numel()).view_as(labels)
    heads.zero_grad(set_to_none=True)
    sums = score(heads, hidden, labels, LossSettings(WEIGHTS, 8), (flat, rows))
    assert torch.equal(sums, expected)


def test_a_head_that_says_what_the_base_says_is_accepted_always():
    probs = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    for name in ("lk_hybrid", "lk_log"):
        loss, _ = OBJECTIVES[name](probs, probs.log())
        assert loss.item() == pytest.approx(0, abs=1e-12)
        assert OBJECTIVES[name](probs, probs.flip(1).log())[0].item() > 0.3


def test_a_head_that_gives_the_targets_no_chance_still_has_a_finite_loss():
    probs = torch.tensor([[1.0, 0.0]])
    for score in OBJECTIVES.values():
        loss, pull = score(probs, torch.tensor([[-200.0, -1e-9]]))
        assert loss.isfinite().all() and pull.isfinite().all()


# ---- counts


def test_counts_and_accuracy():
    heads, (hidden, labels) = make_heads(), make_pairs(200)
    _, logits = reference(heads, hidden, labels)
    with torch.no_grad():
        sums = score(heads, hidden, labels, LossSettings(WEIGHTS, 64))
    for k in range(K):
        hits = logits[k].topk(5).indices == labels[:, k, None]
        assert sums[k, TOP1] == hits[:, 0].sum() and sums[k, TOP5] == hits.any(dim=1).sum() < sums[k, TOP10]
        assert sums[k, LABELS] == (labels[:, k] >= 0).sum()
        assert sums[k, TARGETS] == (labels[:, k] != IGNORE_INDEX).sum() > sums[k, LABELS]


@pytest.mark.parametrize("chunk_size", [7, 1000])
def test_ranks_are_those_of_evaluation(chunk_size):
    heads, (hidden, labels) = make_heads(), make_pairs(60)
    with torch.no_grad():
        ranks = accumulate_gradients(
            heads, hidden, make_prefix(labels), labels, LossSettings(WEIGHTS, chunk_size)
        ).ranks
        logits = heads(hidden)
    for k in range(K):
        there = labels[:, k] != IGNORE_INDEX
        assert torch.equal(ranks[there, k].clamp(max=DRAFT), true_ranks(logits[k], labels[:, k], DRAFT)[there])
        assert (ranks[~there, k] == IGNORE_INDEX).all() and (~there).any()


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_without_gradients_the_sums_are_the_same_and_none_are_made(lm_head):
    heads, (hidden, labels) = make_heads(lm_head), make_pairs()
    expected = score(heads, hidden, labels, LossSettings(WEIGHTS, 8))
    heads.zero_grad(set_to_none=True)
    with torch.no_grad():
        assert torch.equal(score(heads, hidden, labels, LossSettings(WEIGHTS, 8)), expected)
    assert all(parameter.grad is None for parameter in heads.parameters())


@pytest.mark.parametrize("n", [0, 4])
def test_no_labels_make_zeros_not_nan(n):
    heads = make_heads()
    labels = torch.full((n, K), IGNORE_INDEX)
    assert score(heads, torch.randn(n, D, dtype=torch.float64), labels, LossSettings(WEIGHTS, 8)).eq(0).all()


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
        score(heads, hidden, labels, LossSettings(WEIGHTS, chunk))
    assert largest.numel <= max(chunk * DRAFT, 100 * D)
    with LargestTensor() as control:
        reference(heads, hidden, labels)
    assert control.numel >= 100 * DRAFT * K


def test_nor_with_targets_of_the_base():
    heads, (hidden, labels), teacher = make_heads("own", num_heads=K), make_pairs(100), make_teacher(100, m=8)
    with LargestTensor() as largest:
        score(heads, hidden, labels, LossSettings(WEIGHTS, 32, OBJECTIVES["lk_hybrid"]), teacher)
    assert largest.numel <= max(32 * DRAFT, 100 * D)
