"""n-gram lookup in the tree: what followed the last tokens when they stood in the prompt or answer before, as a branch
that competes with the heads' nodes under one budget."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .candidates import CandidateDrafter, Candidates, by_probability
from .draft import NO_TOKEN
from .ngram_index import MAX_MATCH, NgramIndex

# Chance that the token after a match of that many tokens comes again, before anything is known of the request.
PRIOR_RATES = {2: 0.20, 3: 0.35, 4: 0.50, 5: 0.60, 6: 0.68, 7: 0.74, 8: 0.79, 10: 0.84, 12: 0.87, 16: 0.90}
PRIOR_COUNT = 4.0
DECAY = 0.97  # of what was counted, a token
MAX_LENGTH = 16  # tokens of a branch
SMALLEST_CHANCE = 0.02


class MatchRates:
    """How often a match of each length was right in this request: Beta counts that fade."""

    def __init__(self) -> None:
        lengths = range(MAX_MATCH + 1)
        self._prior = [max((rate for size, rate in PRIOR_RATES.items() if size <= n), default=0.0) for n in lengths]
        self._hits, self._tries = [0.0] * (MAX_MATCH + 1), [0.0] * (MAX_MATCH + 1)

    def rate(self, length: int) -> float:
        n = min(length, MAX_MATCH)
        return (self._hits[n] + PRIOR_COUNT * self._prior[n]) / (self._tries[n] + PRIOR_COUNT)

    def count(self, length: int, hit: bool) -> None:
        n = min(length, MAX_MATCH)
        self._hits[n] = DECAY * self._hits[n] + hit
        self._tries[n] = DECAY * self._tries[n] + 1.0

    def chances(self, length: int, count: int) -> list[float]:
        """Of the first `count` tokens after a match, each with those before it. The match grows as they are right."""
        chances, chance = [], 1.0
        for n in range(count):
            chance *= self.rate(length + n)
            if chance < SMALLEST_CHANCE:
                break
            chances.append(chance)
        return chances


@dataclass(frozen=True)
class Guess:
    """What was looked up: `tokens` from place `start` of the text on, after a match of `length`."""

    start: int
    length: int
    tokens: list[int]


@dataclass
class LookupRow:
    """One request's text, rates, and the guess whose outcome is not yet known."""

    index: NgramIndex = field(default_factory=NgramIndex)
    rates: MatchRates = field(default_factory=MatchRates)
    guess: Guess | None = None

    def look_up(self, root: int) -> tuple[list[int], list[float]]:
        """The branch below `root`, the next token of the text: its tokens and their chances; nothing, where none."""
        self._learn(root)
        match = self.index.find(root)
        if match is None:
            return [], []
        chances = self.rates.chances(match.length, MAX_LENGTH)
        tokens = self.index.follow(match, root, MAX_LENGTH)
        # Remembered whole: rates are learnt from tokens too unlikely to be drafted, and so can recover.
        self.guess = Guess(len(self.index.tokens) + 1, match.length, tokens)
        return tokens[: len(chances)], chances

    def _learn(self, root: int) -> None:
        """What came is known whether it was drafted or not."""
        guess, self.guess = self.guess, None
        if guess is None:
            return
        came = [*self.index.tokens[guess.start :], root]
        for n, (guessed, token) in enumerate(zip(guess.tokens, came, strict=False)):
            self.rates.count(guess.length + n, guessed == token)
            if guessed != token:
                return


class LookupDrafter(CandidateDrafter):
    """The candidates of `inner` (nothing but the root without one), and for each row the branch that lookup finds.

    A node that both have is one node, with the higher of the two chances: each alone is a lower bound of what both
    together know. max_nodes: the most that it proposes, the root included.
    """

    def __init__(self, inner: CandidateDrafter | None = None, *, max_nodes: int | None = None) -> None:
        self.inner = inner
        self.max_nodes = max_nodes or (inner.max_nodes if inner else 1) + MAX_LENGTH
        self._rows: defaultdict[int, LookupRow] = defaultdict(LookupRow)

    def candidates(self, root: Tensor, hidden: Tensor) -> Candidates:
        found = [self._rows[row].look_up(token) for row, token in enumerate(root.tolist())]
        candidates = self.inner.candidates(root, hidden) if self.inner else Candidates.of_roots(root)
        length = max(len(tokens) for tokens, _ in found)
        if not length:
            return candidates.cut(self.max_nodes)
        padded = [(t + [NO_TOKEN] * (length - len(t)), c + [0.0] * (length - len(c))) for t, c in found]
        tokens = torch.tensor([row for row, _ in padded], device=root.device)
        chances = torch.tensor([row for _, row in padded], device=root.device)
        return merge_branch(candidates, tokens, chances, self.max_nodes)

    def observe(self, rows: slice, tokens: Tensor, counts: Tensor, hidden: Tensor | None) -> None:
        if self.inner:
            self.inner.observe(rows, tokens, counts, hidden)
        for row, count, grown in zip(range(rows.start, rows.stop), counts.tolist(), tokens.tolist(), strict=True):
            self._rows[row].index.extend(grown[:count])

    def clear_row(self, row: int) -> None:
        if self.inner:
            self.inner.clear_row(row)
        self._rows.pop(row, None)

    def move_row(self, source: int, target: int) -> None:
        if self.inner:
            self.inner.move_row(source, target)
        self._rows[target] = self._rows.pop(source, LookupRow())


def merge_branch(candidates: Candidates, branch: Tensor, chances: Tensor, max_nodes: int) -> Candidates:
    """The best `max_nodes` of candidates [B, N] and of one branch below each root.

    branch: int64 [B, L], padded with NO_TOKEN. chances: float32 [B, L], falling, 0 where padded.
    """
    size, length = candidates.num_nodes, branch.shape[1]
    probability = candidates.probability.clone()
    new_parent = size - 1 + torch.arange(length, device=branch.device).repeat(len(branch), 1)
    is_new = branch != NO_TOKEN
    node = torch.zeros(len(branch), dtype=torch.int64, device=branch.device)
    alive = torch.ones_like(node, dtype=torch.bool)
    for n in range(length):  # down the tree as far as any branch is already in it
        below = (candidates.parent == node[:, None]) & (candidates.tokens == branch[:, n, None]) & is_new[:, n, None]
        new_parent[:, n] = torch.where(alive, node, new_parent[:, n])
        alive = alive & below.any(dim=1)
        if not bool(alive.any()):
            break
        node = torch.where(alive, below.int().argmax(dim=1), node)
        own = probability.gather(1, node[:, None])
        raised = torch.maximum(own, chances[:, n, None])
        probability.scatter_(1, node[:, None], torch.where(alive[:, None], raised, own))
        is_new[:, n] &= ~alive
    tokens = branch.masked_fill(~is_new, NO_TOKEN)
    merged, _ = by_probability(
        torch.cat([candidates.tokens, tokens], dim=1),
        torch.cat([candidates.parent, new_parent.masked_fill(~is_new, 0)], dim=1),
        torch.cat([probability, chances.masked_fill(~is_new, 0.0)], dim=1),
        max_nodes,
    )
    return merged
