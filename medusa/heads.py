"""Heads: K small networks on the base's last hidden state, each guessing one token further ahead.

Head k (0-based) at position t guesses the token at t + k + 2; the base's own lm_head guesses t + 1. All designs answer
the same question, `logits(head, hidden, prefix)`: what comes after these drafted tokens? `MedusaHeads`, here, do not
look at them; those that do are in `conditioned_heads.py`. Not here: the loss, files, how guesses become a tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import HeadsConfig


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)), the identity until trained. [..., D] -> [..., D]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        zero_(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def unit(x: Tensor) -> Tensor:
    """Scaled to a mean square of 1 over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


def zero_(linear: nn.Linear) -> None:
    """Both parts: with a bias left random, SiLU(bias) would move untrained heads off the base's own guess."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


@dataclass(frozen=True)
class Term:
    """A part of a head's logits, `features @ weight.T`: [n, d] and [num_draft_tokens, d]. Its gradients go where the
    two require them."""

    features: Tensor
    weight: Tensor


class Heads(nn.Module, ABC):
    """What all designs share: a projection to the draft vocabulary, and what of the base they use.

    `draft_token_ids`: int64 [num_draft_tokens], ascending, the base's id of each draft index; needed exactly where
    `config.draft_vocab_size` is set. The base's parts come from it: call `init_from_base` on new heads, `attach_base`
    on loaded ones. Raises ValueError for a draft vocabulary that does not fit the config.
    """

    draft_token_ids: Tensor | None
    embeddings: Tensor
    shared_projection: nn.Linear

    def __init__(self, config: HeadsConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_token_ids", _checked_ids(config, draft_token_ids))
        if config.lm_head == "own":
            self.projections = nn.ModuleList(self._new_projection() for _ in range(config.num_heads))

        if config.fused_layers:
            self.fusion = nn.Linear(len(config.fused_layers) * config.hidden_size, config.hidden_size, bias=False)
            nn.init.zeros_(self.fusion.weight)

    def fuse(self, states: Tensor) -> Tensor:
        """What heads see of the base's states [..., (1 + F) x D]: [..., D], the last hidden state plus a projection of
        the fused layers' outputs (as EAGLE-3 has it, Li et al., 2025, arXiv 2503.01840), each scaled to unit mean
        square. Zero-initialised; without fused layers nothing is done."""
        config = self.config
        assert states.shape[-1] == config.hidden_size * (1 + len(config.fused_layers)), "states of other fused layers"
        if not config.fused_layers:
            return states
        last, *fused = states.unflatten(-1, (-1, config.hidden_size)).unbind(-2)
        return last + self.fusion(torch.cat([unit(layer) for layer in fused], dim=-1))

    def _new_projection(self) -> nn.Linear:
        return nn.Linear(self.config.hidden_size, self.config.num_draft_tokens, bias=False)

    def _new_blocks(self, num_layers: int) -> nn.ModuleList:
        # A new block for each place: `[block] * n` would train one block n times.
        return nn.ModuleList(
            nn.Sequential(*(ResidualBlock(self.config.hidden_size) for _ in range(num_layers)))
            for _ in range(self.config.num_heads)
        )

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def lm_head_weight(self) -> Tensor:
        """[num_draft_tokens, D]: the rows of the base's lm_head that a shared projection multiplies by."""
        return self._shared().weight

    def attach_base(self, lm_head: Tensor, embeddings: Tensor) -> None:
        """Give heads the base's lm_head [V, D], of which shared projections keep the draft rows, and the table of its
        input embeddings [V, D]; both frozen and never saved.

        Memory is shared with the base where dtype and device are the same; the embeddings stay in its dtype. Raises
        ValueError where either is another size than the config's.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(lm_head.shape) != expected:
            raise ValueError(
                f"heads: got a base lm_head of shape {list(lm_head.shape)}, expected {list(expected)}; "
                "use the base model that the heads were trained on"
            )
        parameter = next(self.parameters())
        if self.config.sees_prefix:
            if embeddings.shape[1] != expected[1]:
                raise ValueError(
                    f"heads: got a base with input embeddings of {embeddings.shape[1]} numbers, expected "
                    f"{expected[1]}, its hidden size, which {self.config.design} heads need; use heads.design=medusa"
                )
            self.register_buffer("embeddings", embeddings.detach().to(parameter.device), persistent=False)
        if self.config.lm_head == "own":
            return
        rows = self._draft_rows(lm_head).to(parameter.device, parameter.dtype)
        projection = nn.Linear(1, 1, bias=False, device="meta")  # an nn.Linear, so that it can be packed like others
        projection.in_features, projection.out_features = self.config.hidden_size, self.config.num_draft_tokens
        del projection.weight
        projection.register_buffer("weight", rows, persistent=False)
        self.shared_projection = projection

    @torch.no_grad()
    def init_from_base(self, lm_head: Tensor, embeddings: Tensor) -> None:
        """Start new heads from the base: its lm_head is copied into own projections, attached to shared ones."""
        self.attach_base(lm_head, embeddings)
        if self.config.lm_head == "own":
            rows = self._draft_rows(lm_head)
            for k in range(self.config.num_heads):
                self.projection_weight(k).copy_(rows)

    def _draft_rows(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        return weight if self.draft_token_ids is None else weight[self.draft_token_ids.to(weight.device)]

    @abstractmethod
    def features(self, head: int, hidden: Tensor, prefix: Tensor) -> Tensor:
        """What a head projects: [n, D]. Arguments as for `logits`."""

    def logits(self, head: int, hidden: Tensor, prefix: Tensor) -> Tensor:
        """What head `head` expects after a drafted prefix: logits [n, num_draft_tokens].

        hidden: [n, D], what `fuse` makes of the states at t. prefix: int [n, head + 1 or more], the base's ids of the
        tokens from t + 1 (the root) to t + head + 1; what comes behind is not looked at.
        """
        return self.project(self.features(head, hidden, prefix), head)

    def terms(self, head: int, hidden: Tensor, prefix: Tensor) -> list[Term]:
        """The same logits as sums of products, for the loss, which projects in chunks. Weights require grad where they
        are trained."""
        return [Term(self.features(head, hidden, prefix), self.projection_weight(head))]

    def forward(self, hidden: Tensor, prefix: Tensor | None = None) -> Tensor:
        """All heads at once: hidden [..., D] (fused) and prefix int [..., K] -> [K, ..., num_draft_tokens]. Heads that
        do not look at a prefix need none."""
        if prefix is None:
            assert not (self.config.sees_prefix or self.config.markov_rank), "these heads look at a prefix"
            prefix = torch.zeros(*hidden.shape[:-1], self.config.num_heads, dtype=torch.int64, device=hidden.device)
        flat, words = hidden.reshape(-1, hidden.shape[-1]), prefix.reshape(-1, prefix.shape[-1])
        logits = torch.stack([self.logits(k, flat, words) for k in range(self.config.num_heads)])
        return logits.view(len(logits), *hidden.shape[:-1], -1)

    def project(self, features: Tensor, head: int) -> Tensor:
        """[..., D] of one head -> logits [..., num_draft_tokens]."""
        return self._projection(head)(features)

    def projection_weight(self, head: int) -> Tensor:
        """[num_draft_tokens, D] of one head; requires grad where it is trained."""
        weight = self._projection(head).weight
        assert isinstance(weight, Tensor)
        return weight

    def draft_to_base(self, ids: Tensor) -> Tensor:
        """Draft indices, any shape -> the base's token ids."""
        return ids if self.draft_token_ids is None else self.draft_token_ids[ids]

    def _projection(self, head: int) -> nn.Module:
        return self._shared() if self.config.lm_head == "shared" else self.projections[head]

    def _shared(self) -> nn.Linear:
        projection = getattr(self, "shared_projection", None)
        assert projection is not None, "shared heads need attach_base before use"
        return projection


class MedusaHeads(Heads):
    """Independent heads: each guesses from the state alone, blind to what the others drafted.

    Medusa (Cai et al., 2024, arXiv 2401.10774), section 2.1: `x + SiLU(Linear(x))`, zero-initialised, then a projection
    to the vocabulary, so that untrained heads say exactly what the base's lm_head says.
    """

    def __init__(self, config: HeadsConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_token_ids)
        self.blocks = self._new_blocks(config.num_layers)

    def features(self, head: int, hidden: Tensor, prefix: Tensor) -> Tensor:
        return self.blocks[head](hidden)

    def forward(self, hidden: Tensor, prefix: Tensor | None = None) -> Tensor:
        """As `Heads.forward`; shared heads multiply by the lm_head once, all K together."""
        if self.config.lm_head == "own" or self.config.markov_rank is not None:
            return super().forward(hidden, prefix)
        return self._shared()(torch.stack([block(hidden) for block in self.blocks]))


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
