"""A drafter that follows its rows through the hooks alone, so that a hook left out shows as drafts that fail."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from medusa.draft import Draft
from medusa.drafter import Drafter
from medusa.tree import DraftTree


class KnownDrafter(Drafter):
    """Drafts what comes next in one of `texts` (prompt and answer) where the row's text is the beginning of one, with
    mistakes, and noise elsewhere. `rows`: the tokens of each row, as the hooks told them."""

    def __init__(self, texts: Any, vocab_size: int, *, depth: int = 4, mistakes: float = 0.2, seed: int = 0) -> None:
        self.texts, self.vocab_size, self.mistakes = list(texts), vocab_size, mistakes
        self.tree = DraftTree.chain(depth)
        self.max_nodes = self.tree.num_nodes
        self.rows: defaultdict[int, list[int]] = defaultdict(list)
        self.muted: set[int] = set()
        self._generator = torch.Generator().manual_seed(seed)

    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        return Draft.of_tree(
            self.tree, torch.tensor([self._row(row, token) for row, token in enumerate(root.tolist())])
        )

    def _row(self, row: int, root: int) -> list[int]:
        text = [*self.rows[row], root]
        known = next((known for known in self.texts if known[: len(text)] == text), text)
        noise = torch.randint(self.vocab_size, (self.max_nodes,), generator=self._generator).tolist()
        lucky = torch.rand(self.max_nodes, generator=self._generator) > self.mistakes
        following = known[len(text) : len(text) + self.max_nodes - 1]
        drafted = [token if lucky[n] else noise[n] for n, token in enumerate(following)]
        return [root, *drafted, *noise[len(drafted) + 1 :]]

    def observe(self, rows: slice, tokens: Tensor, counts: Tensor, hidden: Tensor | None) -> None:
        for row, count, grown in zip(range(rows.start, rows.stop), counts.tolist(), tokens.tolist(), strict=True):
            self.rows[row] += grown[:count]

    def clear_row(self, row: int) -> None:
        self.rows.pop(row, None)
        self.muted.discard(row)

    def move_row(self, source: int, target: int) -> None:
        self.rows[target] = self.rows.pop(source, [])
        self.muted.discard(target)
        if source in self.muted:
            self.muted.remove(source)
            self.muted.add(target)

    def mute_row(self, row: int) -> None:
        self.muted.add(row)
