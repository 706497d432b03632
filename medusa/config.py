"""What a set of heads is: the few numbers that fix every tensor's shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class HeadsConfig:
    """Shape of a set of heads.

    `design`: "medusa", "markov" or "hydra", see heads.py and conditioned_heads.py. `markov_rank`: of the parent's bias,
    set exactly for that design. `num_layers`: residual blocks a head. `fused_layers`: layers of the base, the first is
    1, whose outputs heads look at beside the last hidden state.
    `lm_head`: "own" gives each head a projection of its own (as the paper has it), "shared" reuses the frozen base's.
    `draft_vocab_size`: heads guess only among that many tokens (the most frequent of the training data); None: all.
    Raises ValueError on values that make no model.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    lm_head: Literal["own", "shared"] = "shared"
    draft_vocab_size: int | None = None
    design: Literal["medusa", "markov", "hydra"] = "medusa"
    markov_rank: int | None = None
    fused_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"heads config: {name} is {value!r}, expected a whole number of at least 1")
        if self.lm_head not in ("own", "shared"):
            raise ValueError(f"heads config: lm_head is {self.lm_head!r}, expected 'own' or 'shared'")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"heads config: draft_vocab_size is {self.draft_vocab_size}, expected 1 to the base model's "
                f"{self.vocab_size} tokens, or null for all of them"
            )
        if self.design not in ("medusa", "markov", "hydra"):
            raise ValueError(f"heads config: design is {self.design!r}, expected 'medusa', 'markov' or 'hydra'")
        rank = self.markov_rank
        if (rank is not None) != (self.design == "markov") or (rank is not None and rank < 1):
            raise ValueError(
                f"heads config: markov_rank is {rank} for the design {self.design!r}, expected at least 1 "
                "for 'markov' and null for the others"
            )

        layers = self.fused_layers
        if not isinstance(layers, list | tuple) or not all(type(n) is int and n > 0 for n in layers):
            raise ValueError(f"heads config: fused_layers is {layers!r}, expected numbers of layers, the first being 1")
        object.__setattr__(self, "fused_layers", tuple(layers))  # JSON has lists

    @property
    def sees_prefix(self) -> bool:
        """Whether heads look at the embeddings of drafted tokens."""
        return self.design == "hydra"

    @property
    def num_draft_tokens(self) -> int:
        """Width of the heads' logits."""
        return self.draft_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
