"""Heads whose probabilities are made up, for tests of whatever grows trees out of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class ScriptedHeads:
    """Random logits; with `design` other than medusa, others below every prefix. Draft index i is token `ids[i]`."""

    def __init__(self, num_heads: int, ids: list[int], *, design: str = "medusa", seed: int = 0, scale: float = 2.0):
        self.config = SimpleNamespace(num_heads=num_heads, num_draft_tokens=len(ids), design=design)
        self.ids, self.seed, self.scale = torch.tensor(ids), seed, scale

    def fuse(self, states):
        return states

    def logits(self, head: int, hidden: Tensor, prefix: Tensor) -> Tensor:
        assert hidden.shape[0] == prefix.shape[0] and prefix.shape[1] == head + 1
        rows = zip(hidden[:, 0].tolist(), prefix.tolist(), strict=True)
        return torch.stack([self._row(head, state, tokens) for state, tokens in rows])

    def _row(self, head: int, state: float, prefix: list[int]) -> Tensor:
        key: Any = (self.seed, head, state, tuple(prefix) if self.config.design != "medusa" else ())
        generator = torch.Generator().manual_seed(hash(key) % 2**31)
        return torch.randn(len(self.ids), generator=generator) * self.scale

    def __call__(self, hidden: Tensor) -> Tensor:
        assert self.config.design == "medusa", "only independent heads run all at once"
        nothing = torch.zeros(len(hidden), self.config.num_heads, dtype=torch.int64)
        return torch.stack([self.logits(k, hidden, nothing[:, : k + 1]) for k in range(self.config.num_heads)])

    def draft_to_base(self, ids: Tensor) -> Tensor:
        return self.ids[ids]

    def path_probability(self, state: float, root: int, path: tuple[int, ...], temperatures: list[float]) -> float:
        """The slow way: of tokens `path` below `root`."""
        probability, prefix = 1.0, [root]
        for head, token in enumerate(path):
            row = self._row(head, state, prefix).double() / temperatures[head]
            probability *= float(row.softmax(-1)[self.ids.tolist().index(token)])
            prefix.append(token)
        return probability
