"""The heads' loss on (hidden [n, D], prefix [n, K], labels [n, K]) triples: exact, and never K x B x T x V
numbers at once.

Per head, rows are projected a chunk at a time. A chunk's loss, its gradient with respect to the features and the ranks
of its labels all come from the same logits, which are then overwritten by the next chunk's; nothing is recomputed in
the backward pass. Heads go through forward and backward one after the other, so memory grows with neither K nor V.

All results are sums: whoever steps the optimizer divides by the number of labels over all micro-batches and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa.heads import Heads, Term

from .labels import IGNORE_INDEX
from .objectives import Score, cross_entropy
from .targets import Targets

# Columns of the sums [K, NUM_SUMS] that come with every loss.
LOSS, LABELS, TARGETS, TOP1, TOP5, TOP10 = range(6)
NUM_SUMS = 6
TOPS = {TOP1: 1, TOP5: 5, TOP10: 10}
OUTSIDE_RANK = 1 << 30  # beyond any list


def head_weights(num_heads: int, decay: float) -> list[float]:
    """decay^k for head k: Medusa, section 2.2.1, with 0.8."""
    return [decay**k for k in range(num_heads)]


@dataclass(frozen=True)
class LossSettings:
    """weights: one per head. chunk_size: rows projected to the vocabulary at once. compute_dtype: of the matrix
    products (bfloat16 for mixed precision); None: the heads' own."""

    weights: Sequence[float]
    chunk_size: int
    score: Score = cross_entropy
    compute_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class HeadScores:
    """What n positions gave, all sums. sums: float64 [K, NUM_SUMS]: per head loss (not weighted), labels, targets
    (labels and those outside the draft vocabulary), labels ranked 1st, in the first 5, in the first 10. ranks: int64
    [n, K], of each label in its head's list (a tie counts for the label): OUTSIDE_RANK for a target outside the draft
    vocabulary, IGNORE_INDEX where there is none."""

    sums: Tensor
    ranks: Tensor


def accumulate_gradients(
    heads: Heads,
    hidden: Tensor,
    prefix: Tensor,
    labels: Tensor,
    settings: LossSettings,
    teacher: tuple[Targets, Tensor] | None = None,
) -> HeadScores:
    """Adds the gradients of sum_k weights[k] * (sum of head k's losses) to the heads' parameters.

    hidden: [n, (1 + F) x D], the base's states. prefix: int32 [n, K], the tokens that heads may look at (see
    `gather_prefix`). labels: int64 [n, K]. teacher: the base's targets at the n positions and `teacher_rows` [n, K];
    None: the labels are the targets. Where no gradient is wanted (`torch.no_grad()`), only the sums are made.
    """
    sums = torch.zeros(len(settings.weights), NUM_SUMS, dtype=torch.float64, device=hidden.device)
    ranks = labels.where(labels == IGNORE_INDEX, OUTSIDE_RANK)
    fused, seen = _fuse(heads, hidden, settings)
    for k in range(len(settings.weights)):
        sums[k, TARGETS] = (labels[:, k] != IGNORE_INDEX).sum()
        rows = (labels[:, k] >= 0).nonzero().squeeze(1)
        if len(rows) == 0:
            continue
        own = labels[rows, k]
        targets = Targets.one_hot(own) if teacher is None else teacher[0][teacher[1][rows, k]]
        # In a function of its own, so that nothing of one head's is still held while the next one's is made.
        sums[k, LOSS], ranks[rows, k] = _score_head(heads, k, seen[rows], prefix[rows, : k + 1], own, targets, settings)
        sums[k, LABELS] = len(rows)
        for column, top in TOPS.items():
            sums[k, column] = (ranks[rows, k] < top).sum()
    if fused is not None and seen.grad is not None:
        fused.backward(seen.grad)
    return HeadScores(sums, ranks)


def _fuse(heads: Heads, hidden: Tensor, settings: LossSettings) -> tuple[Tensor | None, Tensor]:
    """The fused states, None where there are none, and what heads see, [n, D]: a leaf in which their gradients meet, so
    that the fusion's backward pass is made once, not once a head."""
    if not heads.config.fused_layers:
        return None, hidden
    dtype = settings.compute_dtype or heads.dtype
    with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype != heads.dtype):
        fused = heads.fuse(hidden.to(heads.dtype))
    return fused, fused.detach().requires_grad_(fused.requires_grad)


def _score_head(
    heads: Heads, k: int, hidden: Tensor, prefix: Tensor, labels: Tensor, targets: Targets, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """(loss sum, ranks [n]) of head k at its n labels; its gradients, weighted, are added to the parameters'."""
    loss, ranks = ProjectedLoss.apply(labels, targets, settings, *_products(heads, k, hidden, prefix, settings))
    if torch.is_grad_enabled():
        (settings.weights[k] * loss).backward()
    return loss.detach(), ranks


def _products(heads: Heads, k: int, hidden: Tensor, prefix: Tensor, settings: LossSettings) -> list[Tensor]:
    """Head k's terms, [features, weight, features, weight, ...], in the dtype of the products."""
    dtype = settings.compute_dtype or heads.dtype
    with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype != heads.dtype):
        terms = heads.terms(k, hidden.to(heads.dtype), prefix)
    flat = [tensor.to(dtype) for term in terms for tensor in (term.features, term.weight)]
    # Detached where no gradient is wanted: else the function behind would still make gradients for them.
    return flat if torch.is_grad_enabled() else [tensor.detach() for tensor in flat]


class ProjectedLoss(torch.autograd.Function):
    """(labels int64 [n] >= 0, targets of n rows, settings, features [n, d], weight [V, d], ...) -> (loss sum, ranks).

    Features and weights come in pairs, a pair for each `Term`. The same as `settings.score` on log_softmax(sum of
    features @ weight.T) at the targets' ids, summed, with float32 sums for half precision. ranks: int64 [n], how many
    tokens have larger logits than the label.
    """

    @staticmethod
    def forward(
        ctx: Any, labels: Tensor, targets: Targets, settings: LossSettings, *flat: Tensor
    ) -> tuple[Tensor, Tensor]:
        terms = [Term(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
        features, weight = terms[0].features, terms[0].weight
        exact, chunk_size = torch.promote_types(features.dtype, torch.float32), settings.chunk_size
        wants = ctx.needs_input_grad[3:]
        grads = [
            None if not wanted else torch.empty_like(t) if i % 2 == 0 else torch.zeros_like(t, dtype=exact)
            for i, (t, wanted) in enumerate(zip(flat, wants, strict=True))
        ]
        loss = torch.zeros((), dtype=torch.float64, device=features.device)
        ranks = torch.empty_like(labels)
        buffer = features.new_empty(min(chunk_size, len(features)), len(weight))
        for start in range(0, len(features), chunk_size):
            rows = slice(start, start + chunk_size)
            ids = targets.ids[rows]
            products = torch.mm(features[rows], weight.t(), out=buffer[: len(ids)])
            for term in terms[1:]:
                products.addmm_(term.features[rows], term.weight.t())
            logits = products.to(exact)  # no copy where it is exact already
            ranks[rows] = (logits > logits.gather(1, labels[rows, None])).sum(dim=1, dtype=torch.int32).long()
            # In place, and scaled after the products rather than before: two passes over [chunk, V] fewer.
            at_ids, largest = logits.gather(1, ids), logits.amax(dim=1, keepdim=True)
            total = logits.sub_(largest).exp_().sum(dim=1, keepdim=True)
            losses, pull = settings.score(targets.probs[rows].to(exact), at_ids - (total.log() + largest))
            loss += losses.sum(dtype=torch.float64)
            exponentials, scale = logits.to(weight.dtype), pull.sum(dim=1, keepdim=True) / total
            for term, grad_features, grad_weight in zip(terms, grads[::2], grads[1::2], strict=True):
                if grad_features is not None:
                    pulled = F.embedding_bag(ids, term.weight, per_sample_weights=pull.to(weight.dtype), mode="sum")
                    product = torch.mm(exponentials, term.weight).to(exact)
                    grad_features[rows] = product.mul_(scale).sub_(pulled)
                if grad_weight is not None:
                    x = term.features[rows].to(exact)
                    grad_weight += torch.mm(exponentials.t(), (x * scale).to(weight.dtype))
                    for m in range(ids.shape[1]):
                        grad_weight.index_add_(0, ids[:, m], x * pull[:, m, None], alpha=-1)
        ctx.grads = grads
        ctx.mark_non_differentiable(ranks)
        return loss, ranks

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_ranks: Tensor) -> Any:
        grads = [None if g is None else g.mul_(grad_loss.to(g.dtype)) for g in ctx.grads]
        ctx.grads = None
        return None, None, None, *grads
