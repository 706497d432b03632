"""Heads that look at the drafted tokens before theirs, so that a tree of them holds fewer impossible sentences.

`MarkovHeads` see the parent only, through a low-rank bias that is nearly free; `HydraHeads` see the whole prefix. In
training the prefix is the text itself (teacher forcing), in decoding the path of a node.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import HeadsConfig
from .heads import Heads, MedusaHeads, Term, unit, zero_


class MarkovHeads(MedusaHeads):
    """Medusa heads plus `W1[parent] @ W2`, of rank `config.markov_rank` and the same for all heads.

    The low-rank Markov bias of DSpark (section 4.3.2 there). W1 is small and random, W2 zero: no bias until trained.
    """

    def __init__(self, config: HeadsConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_token_ids)
        assert config.markov_rank is not None
        self.parents = nn.Embedding(config.vocab_size, config.markov_rank)
        nn.init.normal_(self.parents.weight, std=config.markov_rank**-0.5)
        self.bias = nn.Linear(config.markov_rank, config.num_draft_tokens, bias=False)
        nn.init.zeros_(self.bias.weight)

    def logits(self, head: int, hidden: Tensor, prefix: Tensor) -> Tensor:
        return super().logits(head, hidden, prefix) + self.bias(self.parents(prefix[:, head]))

    def terms(self, head: int, hidden: Tensor, prefix: Tensor) -> list[Term]:
        return [*super().terms(head, hidden, prefix), Term(self.parents(prefix[:, head]), self.bias.weight)]


class HydraHeads(Heads):
    """`h + SiLU(Linear([h, e(x_1), .., e(x_k+1)]))`, then further residual blocks, on the state and the embeddings of
    the drafted prefix.

    Hydra (Ankner et al., 2024, arXiv 2402.05109), section 3. Both inputs are scaled to unit mean square, as embeddings
    and last states of a base may differ by orders of magnitude. Zero-initialised: untrained heads say what the base's
    lm_head says.
    """

    def __init__(self, config: HeadsConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_token_ids)
        size = config.hidden_size
        self.inputs = nn.ModuleList(nn.Linear((k + 2) * size, size) for k in range(config.num_heads))
        for linear in self.inputs:
            assert isinstance(linear, nn.Linear)
            zero_(linear)
        self.blocks = self._new_blocks(config.num_layers - 1)

    def features(self, head: int, hidden: Tensor, prefix: Tensor) -> Tensor:
        words = self.embeddings[prefix[:, : head + 1]].to(hidden.dtype)  # [n, head + 1, D]
        seen = unit(torch.cat([hidden[:, None], words], dim=1)).flatten(1)
        return self.blocks[head](hidden + F.silu(self.inputs[head](seen)))


DESIGNS: dict[str, type[Heads]] = {"medusa": MedusaHeads, "markov": MarkovHeads, "hydra": HydraHeads}


def make_heads(config: HeadsConfig, draft_token_ids: Tensor | None = None) -> Heads:
    """New heads of the config's design. Raises ValueError as `Heads` does."""
    return DESIGNS[config.design](config, draft_token_ids)
