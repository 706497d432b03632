"""The heads' loss on (hidden [n, D], labels [n, K]) pairs: exact, and never K x B x T x V numbers at once.

Per head, rows are projected a chunk at a time. A chunk's loss, its gradient with respect to the features and the ranks
of its labels all come from the same logits, which are then overwritten by the next chunk's; nothing is recomputed in
the backward pass. Heads go through forward and backward one after the other, so memory grows with neither K nor V.

All results are sums: whoever steps the optimizer divides by the number of labels over all micro-batches and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa.heads import MedusaHeads

IGNORE_INDEX = -100  # no token there, or not one under loss
OUTSIDE_INDEX = -1  # a token under loss, but outside the draft vocabulary: no label for the loss, a miss for accuracy
# Columns of the sums [K, 5] that come with every loss.
NLL, LABELS, TARGETS, TOP1, TOP5 = range(5)


def label_positions(loss_mask: Tensor, num_heads: int) -> Tensor:
    """bool [B, T]: the positions t of which some head's target, t + k + 2, is under loss and inside the row.

    The position itself may be the prompt's: the first token that the assistant writes is guessed from there.
    """
    reached = torch.zeros_like(loss_mask)
    for k in range(num_heads):
        reached[:, : -(k + 2)] |= loss_mask[:, k + 2 :]
    return reached


def gather_labels(input_ids: Tensor, loss_mask: Tensor, num_heads: int, base_to_draft: Tensor) -> Tensor:
    """int64 [n, K]: each head's label at the n positions of `label_positions`, row by row.

    input_ids, loss_mask: [B, T]. base_to_draft: int64 [V], see `draft_index`. Labels are draft indices, IGNORE_INDEX
    or OUTSIDE_INDEX.
    """
    targets = torch.where(loss_mask, base_to_draft[input_ids], IGNORE_INDEX)
    labels = torch.full((*input_ids.shape, num_heads), IGNORE_INDEX, dtype=torch.int64, device=input_ids.device)
    for k in range(num_heads):
        labels[:, : -(k + 2), k] = targets[:, k + 2 :]
    return labels[label_positions(loss_mask, num_heads)]


def draft_index(draft_token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """int64 [V]: draft index of each base token, OUTSIDE_INDEX where it has none."""
    if draft_token_ids is None:
        return torch.arange(vocab_size)
    index = torch.full((vocab_size,), OUTSIDE_INDEX, dtype=torch.int64, device=draft_token_ids.device)
    index[draft_token_ids] = torch.arange(len(draft_token_ids), device=draft_token_ids.device)
    return index


def head_weights(num_heads: int, decay: float) -> list[float]:
    """decay^k for head k: Medusa, section 2.2.1, with 0.8."""
    return [decay**k for k in range(num_heads)]


def accumulate_gradients(
    heads: MedusaHeads,
    hidden: Tensor,
    labels: Tensor,
    weights: Sequence[float],
    chunk_size: int,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Adds the gradients of sum_k weights[k] * (sum of head k's cross-entropies) to the heads' parameters.

    hidden: [n, D]. labels: int64 [n, K]. Where no gradient is wanted (`torch.no_grad()`), only the sums are made.
    `compute_dtype`: of the matrix products (bfloat16 for mixed precision); None: the heads' own.
    Returns float64 [K, 5]: per head NLL sum (not weighted), labels, targets (labels and those outside the draft
    vocabulary), and labels ranked 1st and in the first 5.
    """
    dtype = compute_dtype or heads.dtype
    sums = torch.zeros(len(weights), 5, dtype=torch.float64, device=hidden.device)
    for k, weight in enumerate(weights):
        sums[k, TARGETS] = (labels[:, k] != IGNORE_INDEX).sum()
        rows = (labels[:, k] >= 0).nonzero().squeeze(1)
        if len(rows) == 0:
            continue
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype != heads.dtype):
            features = heads.blocks[k](hidden[rows].to(heads.dtype))
        projection = heads.projection_weight(k).to(dtype)
        if not torch.is_grad_enabled():
            projection = projection.detach()  # else the function below would still make a gradient for it
        nll, counts = ProjectedCrossEntropy.apply(features.to(dtype), projection, labels[rows, k], chunk_size)
        if torch.is_grad_enabled():
            (weight * nll).backward()
        sums[k, NLL] = nll.detach()
        sums[k, LABELS] = len(rows)
        sums[k, TOP1:] = counts
    return sums


class ProjectedCrossEntropy(torch.autograd.Function):
    """(features [n, D], weight [V, D], labels int64 [n] >= 0, chunk_size) -> (sum of cross-entropies, counts [2]).

    The same as F.cross_entropy(features @ weight.T, labels, reduction="sum"), with float32 sums for half precision.
    counts: how many labels rank 1st and in the first 5 (a tie counts for the label).
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, labels: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        wants_features, wants_weight = ctx.needs_input_grad[:2]
        exact = torch.promote_types(features.dtype, torch.float32)
        ctx.grad_features = torch.empty_like(features) if wants_features else None
        ctx.grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        nll = torch.zeros((), dtype=torch.float64, device=features.device)
        counts = torch.zeros(2, dtype=torch.int64, device=features.device)
        buffer = features.new_empty(min(chunk_size, len(features)), len(weight))
        for start in range(0, len(features), chunk_size):
            x, y = features[start : start + chunk_size], labels[start : start + chunk_size]
            logits = torch.mm(x, weight.t(), out=buffer[: len(x)]).to(exact)  # no copy where it is exact already
            at_label = logits.gather(1, y[:, None])
            rank = (logits > at_label).sum(dim=1, dtype=torch.int32)
            counts += torch.stack([(rank < 1).sum(), (rank < 5).sum()])
            # In place, and scaled after the products rather than before: two passes over [chunk, V] fewer.
            largest = logits.amax(dim=1, keepdim=True)
            total = logits.sub_(largest).exp_().sum(dim=1, keepdim=True)
            nll += (total.log() + largest - at_label).sum(dtype=torch.float64)
            exponentials = logits.to(weight.dtype)
            if ctx.grad_features is not None:
                grad = torch.mm(exponentials, weight).to(exact).div_(total).sub_(weight[y])
                ctx.grad_features[start : start + len(x)] = grad
            if ctx.grad_weight is not None:
                ctx.grad_weight += torch.mm(exponentials.t(), (x.to(exact) / total).to(weight.dtype))
                ctx.grad_weight.index_add_(0, y, x.to(exact), alpha=-1)
        ctx.mark_non_differentiable(counts)
        return nll, counts

    @staticmethod
    def backward(ctx: Any, grad_nll: Tensor, grad_counts: Tensor) -> Any:
        grads = [None if g is None else g.mul_(grad_nll.to(g.dtype)) for g in (ctx.grad_features, ctx.grad_weight)]
        ctx.grad_features = ctx.grad_weight = None
        return grads[0], grads[1], None, None
