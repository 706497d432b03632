"""Log-probabilities of tokens under the base's own distribution: log-softmax of its logits as they are, before
penalties, processors, temperature and truncations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """One token's log-probability (natural logarithm), and the likeliest tokens in its place, best first, with theirs.
    The token itself need not be among them."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """logits: [n, V], from which each of the n tokens was chosen."""
    assert len(logits) == len(token_ids), (logits.shape, len(token_ids))
    logprobs = logits.float().log_softmax(dim=-1)
    index = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen = logprobs.gather(1, index[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(map(TokenLogprob, token_ids, chosen, tops))
