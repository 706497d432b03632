"""Drafters: whatever fills a tree with tokens. The verifier does not know which one did.

`Drafter` is the seam that every design plugs into; `RootDrafter` drafts nothing (plain autoregressive decoding). The
others are in `heads_drafter.py` and `lookup.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from .draft import Draft


class Drafter(ABC):
    """Proposes a tree for every live row. Drafters that remember rows follow them through the hooks below, which are
    called for rows as the KV cache's are; one engine at a time may use such a drafter.

    max_nodes: the largest N that `propose` may return.
    """

    max_nodes: int

    @abstractmethod
    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [B], the base's next token; hidden [B, D], the state it was predicted from."""

    def observe(  # noqa: B027 - a hook
        self, rows: slice, tokens: Tensor, counts: Tensor, hidden: Tensor | None
    ) -> None:
        """Rows have grown: row b of them by `tokens[b, :counts[b]]` (int64 [b, L] and [b], on the CPU), whose states
        are `hidden[b, :counts[b]]` ([b, L, D]; None where keys and values came out of a prefix cache). Called for the
        prompt, in chunks, and after every step."""

    def clear_row(self, row: int) -> None:  # noqa: B027
        """The row is empty, or about to be filled anew."""

    def move_row(self, source: int, target: int) -> None:  # noqa: B027
        """Row `target` holds from now on what row `source` holds."""

    def mute_row(self, row: int) -> None:  # noqa: B027
        """Until it is cleared, what is drafted for this row is thrown away. `propose` is not called where all are."""


class RootDrafter(Drafter):
    """Nothing is drafted: one token a step."""

    max_nodes = 1

    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        return Draft.of_roots(root)
