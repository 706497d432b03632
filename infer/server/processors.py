"""OpenAI's logit_bias as a logits processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import bad_request


@dataclass(frozen=True)
class LogitBias:
    """Adds to the scores of some tokens. Equal where all biases are: rows that share them are worked on together."""

    token_ids: tuple[int, ...]
    biases: tuple[float, ...]

    @classmethod
    def of(cls, biases: Mapping[str, float], vocab_size: int) -> LogitBias:
        """Raises ApiError 400 for a key that is no token id of the model."""
        for name in biases:
            if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
                expected = f"token ids from 0 to {vocab_size - 1}"
                raise bad_request(f"logit_bias: got the key {name[:20]!r}, expected {expected}", "logit_bias")
        by_id = {int(name): bias for name, bias in sorted(biases.items())}
        return cls(tuple(by_id), tuple(by_id.values()))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: float32 [n, V]."""
        biases = torch.tensor(self.biases, dtype=scores.dtype, device=scores.device)
        index = torch.tensor(self.token_ids, device=scores.device)
        return scores.index_add(1, index, biases.expand(len(scores), -1))
