"""The losses of one head as functions of a short target list: values, and the gradient that they put on the logits.

Every loss here depends on the head's distribution p only through log p at a target's M tokens. With
`pull = -dloss / dlog p` there, the gradient with respect to all V logits is `sum(pull) * p - scatter(pull)`, so no loss
needs more than the softmax that cross-entropy needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

# probs q [n, M], log_probs log p [n, M] -> (loss [n], pull [n, M])
Score = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Objective = Literal["cross_entropy", "distillation", "lk_hybrid", "lk_log"]

LK_DECAY = 3.0  # eta of the adaptive blend


def cross_entropy(probs: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """-sum q log p: to a one-hot target the usual loss, to the base's distribution soft distillation."""
    return -(probs * log_probs).sum(dim=1), probs


def lk_log(probs: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """-log alpha with alpha = sum min(p, q), the share of drafts that lossless sampling accepts (LK losses, Samarin et
    al., 2026, arXiv 2602.23881)."""
    log_alpha, below = _acceptance(probs, log_probs)
    return -log_alpha, (log_probs - log_alpha[:, None]).exp().where(below, 0.0)


def lk_hybrid(probs: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """w KL(q || p) + (1 - w) (1 - alpha), w = exp(-3 alpha) per position, no gradient through w: the divergence where
    the head is far off, acceptance itself where it is near (LK losses, as above)."""
    log_alpha, below = _acceptance(probs, log_probs)
    alpha = log_alpha.exp()
    blend = torch.exp(-LK_DECAY * alpha)
    divergence = (torch.special.xlogy(probs, probs) - probs * log_probs).sum(dim=1)
    accepted = log_probs.exp().where(below, 0.0)  # dalpha / dlog p
    return blend * divergence + (1 - blend) * (1 - alpha), blend[:, None] * probs + (1 - blend[:, None]) * accepted


def _acceptance(probs: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """log alpha [n], kept as a logarithm because untrained heads can be far off; and where p < q, bool [n, M]."""
    target = probs.log()
    return torch.minimum(log_probs, target).logsumexp(dim=1), log_probs < target


OBJECTIVES: dict[Objective, Score] = {
    "cross_entropy": cross_entropy,
    "distillation": cross_entropy,
    "lk_hybrid": lk_hybrid,
    "lk_log": lk_log,
}
