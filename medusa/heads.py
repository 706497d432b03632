"""Medusa heads: K small residual networks on the base's last hidden state, each guessing one token further ahead.

Head k (0-based) at position t guesses the token at t + k + 2; the base's own lm_head guesses t + 1. Medusa (Cai et al.,
2024, arXiv 2401.10774), section 2.1: `x + SiLU(Linear(x))`, zero-initialised, then a projection to the vocabulary, so
that untrained heads say exactly what the base's lm_head says. Not here: the loss, files, how guesses become a tree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import HeadsConfig


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)), the identity until trained. [..., D] -> [..., D]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        # Both zero: with a bias left random, SiLU(bias) would move untrained heads off the base's own guess.
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """K heads on one hidden state.

    `draft_token_ids`: int64 [num_draft_tokens], ascending, the base's id of each draft index; needed exactly where
    `config.draft_vocab_size` is set. A projection comes from the base: call `init_from_lm_head` on new heads,
    `attach_lm_head` on loaded ones. Raises ValueError for a draft vocabulary that does not fit the config.
    """

    draft_token_ids: Tensor | None
    shared_projection: nn.Linear

    def __init__(self, config: HeadsConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        # A new block for each place: `[block] * n` would train one block n times.
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        self.register_buffer("draft_token_ids", _checked_ids(config, draft_token_ids))
        if config.lm_head == "own":
            self.projections = nn.ModuleList(self._new_projection() for _ in range(config.num_heads))

    def _new_projection(self) -> nn.Linear:
        return nn.Linear(self.config.hidden_size, self.config.num_draft_tokens, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def lm_head_weight(self) -> Tensor:
        """[num_draft_tokens, D]: the rows of the base's lm_head that a shared projection multiplies by."""
        return self._shared().weight

    def attach_lm_head(self, weight: Tensor) -> None:
        """Give shared heads the base's lm_head [V, D]: only the draft rows are kept, frozen and never saved.

        Without a draft vocabulary, and in the heads' own dtype and device, memory is shared with the base. Heads with
        projections of their own only check the shape. Raises ValueError where it is another size than the config's.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"heads: got a base lm_head of shape {list(weight.shape)}, expected {list(expected)}; "
                "use the base model that the heads were trained on"
            )
        if self.config.lm_head == "own":
            return
        parameter = next(self.parameters())
        rows = self._draft_rows(weight).to(parameter.device, parameter.dtype)
        projection = nn.Linear(1, 1, bias=False, device="meta")  # an nn.Linear, so that it can be packed like others
        projection.in_features, projection.out_features = self.config.hidden_size, self.config.num_draft_tokens
        del projection.weight
        projection.register_buffer("weight", rows, persistent=False)
        self.shared_projection = projection

    @torch.no_grad()
    def init_from_lm_head(self, weight: Tensor) -> None:
        """Start new heads from the base's lm_head [V, D]: copied into own projections, attached to shared ones."""
        self.attach_lm_head(weight)
        if self.config.lm_head == "own":
            rows = self._draft_rows(weight)
            for k in range(self.config.num_heads):
                self.projection_weight(k).copy_(rows)

    def _draft_rows(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        return weight if self.draft_token_ids is None else weight[self.draft_token_ids.to(weight.device)]

    def features(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [K, ..., D]: what each head projects."""
        return torch.stack([block(hidden) for block in self.blocks])

    def project(self, features: Tensor, head: int) -> Tensor:
        """[..., D] of one head -> logits [..., num_draft_tokens]."""
        return self._projection(head)(features)

    def projection_weight(self, head: int) -> Tensor:
        """[num_draft_tokens, D] of one head; requires grad where it is trained."""
        weight = self._projection(head).weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> logits [K, ..., num_draft_tokens]. Shared heads multiply by the lm_head once, all K together."""
        features = self.features(hidden)
        if self.config.lm_head == "shared":
            return self._shared()(features)
        return torch.stack([self.project(features[k], k) for k in range(self.config.num_heads)])

    def logits(self, head: int, hidden: Tensor, prefix: Tensor) -> Tensor:
        """What head `head` expects after a drafted prefix: logits [n, num_draft_tokens].

        hidden: [n, D], the states at t. prefix: int64 [n, head + 1], the base's ids of the tokens at t + 1 (the root)
        to t + head + 1. Independent heads do not look at it.
        """
        return self.project(self.blocks[head](hidden), head)

    def draft_to_base(self, ids: Tensor) -> Tensor:
        """Draft indices, any shape -> the base's token ids."""
        return ids if self.draft_token_ids is None else self.draft_token_ids[ids]

    def _projection(self, head: int) -> nn.Module:
        return self._shared() if self.config.lm_head == "shared" else self.projections[head]

    def _shared(self) -> nn.Linear:
        projection = getattr(self, "shared_projection", None)
        assert projection is not None, "shared heads need attach_lm_head(base lm_head) before use"
        return projection


def _checked_ids(config: HeadsConfig, ids: Tensor | None) -> Tensor | None:
    if config.draft_vocab_size is None:
        if ids is not None:
            raise ValueError(
                "heads: got draft token ids, expected none as draft_vocab_size is null; set it, or omit ids"
            )
        return None
    expected = f"{config.draft_vocab_size} ascending int64 token ids below {config.vocab_size}"
    if ids is None:
        raise ValueError(f"heads: got no draft token ids, expected {expected} as draft_vocab_size is set")
    if ids.dtype != torch.int64 or tuple(ids.shape) != (config.draft_vocab_size,):
        raise ValueError(f"heads: got draft token ids {ids.dtype} {list(ids.shape)}, expected {expected}")
    if not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise ValueError(f"heads: got draft token ids repeated, out of order or out of range, expected {expected}")
    return ids.clone()
