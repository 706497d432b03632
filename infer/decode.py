"""The decoding loop's body: prefill a row, chunk by chunk, then propose, verify, accept, commit, over and over.

One batched, ragged step is the only implementation. Plain generation, streaming, distillation, the benchmark, the
server and the autoregressive baseline (a tree that is only its root) are drivers of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa.acceptance import GREEDY, AcceptanceRule
from medusa.base_model import BaseModel
from medusa.draft import Draft
from medusa.drafter import Drafter
from medusa.kv_cache import KVCache

from .logprobs import TokenLogprob, token_logprobs


@dataclass
class DecodeState:
    """The live rows `0..B-1` of a cache and of a drafter, and what the next step starts from. Rows above are free, or
    hold prompts on their way.

    root: int64 [B], tokens chosen by the base and not yet in the cache. hidden: [B, D], the states that chose them.
    """

    cache: KVCache
    drafter: Drafter
    root: Tensor
    hidden: Tensor

    @property
    def num_rows(self) -> int:
        return int(self.root.shape[0])

    @property
    def rows(self) -> slice:
        return slice(0, self.num_rows)

    @classmethod
    def empty(cls, base_model: BaseModel, drafter: Drafter, *, max_rows: int, capacity: int) -> DecodeState:
        """capacity: tokens that a row may grow to; what a draft needs comes on top."""
        cache, device = base_model.new_cache(max_rows, capacity + drafter.max_nodes), base_model.device
        hidden = torch.empty(0, base_model.state_size, dtype=base_model.dtype, device=device)
        return cls(cache, drafter, torch.empty(0, dtype=torch.int64, device=device), hidden)

    @torch.inference_mode()
    def append(self, root: Tensor, hidden: Tensor) -> None:
        """Row B, which holds a whole prompt, is live from now on."""
        self.root, self.hidden = torch.cat([self.root, root]), torch.cat([self.hidden, hidden])

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Drop a live row; the last one takes its place."""
        last = self.num_rows - 1
        if row != last:
            self.move_row(last, row)
            self.root[row], self.hidden[row] = self.root[last], self.hidden[last]
        self.clear_row(last)
        self.root, self.hidden = self.root[:last], self.hidden[:last]

    @torch.inference_mode()
    def move_row(self, source: int, target: int) -> None:
        self.cache.move_row(source, target)
        self.drafter.move_row(source, target)

    def clear_row(self, row: int) -> None:
        self.cache.clear_row(row)
        self.drafter.clear_row(row)


@dataclass(frozen=True)
class Step:
    """What a step gave, on the CPU: row b emits `tokens[b, :counts[b]]`, accepted draft tokens first and the bonus
    token last, of `num_drafted[b]` that were drafted. tokens: int64 [B, L]; the others int64 [B]. logprobs: one for
    each emitted token of the rows that asked."""

    tokens: Tensor
    counts: Tensor
    num_drafted: Tensor
    logprobs: Mapping[int, list[TokenLogprob]] = field(default_factory=dict)


@torch.inference_mode()
def prefill(base_model: BaseModel, state: DecodeState, row: int, token_ids: Sequence[int]) -> Tensor:
    """Append a prompt, or the next chunk of one, to a row of the cache. Returns its states, [n, D]."""
    rows, size = slice(row, row + 1), len(token_ids)
    tokens, nodes, counts = torch.tensor([token_ids]), torch.arange(size)[None], torch.tensor([size])
    positions = (state.cache.lengths[row] + nodes).to(base_model.device)
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    hidden = base_model.forward(tokens.to(base_model.device), positions, mask, state.cache, rows)
    state.cache.commit(rows, nodes, counts)
    state.drafter.observe(rows, tokens, counts, hidden)
    return hidden[0]


@torch.inference_mode()
def decode_step(
    base_model: BaseModel,
    state: DecodeState,
    rule: AcceptanceRule = GREEDY,
    *,
    muted: Collection[int] = (),
    scored: Mapping[int, int] | None = None,
) -> Step:
    """One step of every live row. muted: rows for which nothing is drafted. scored: rows whose tokens'
    log-probabilities are wanted, each with how many of the likeliest tokens beside them."""
    rows, cache = state.rows, state.cache
    draft = _propose(state, muted)
    positions = cache.lengths[rows, None].to(draft.depth.device) + draft.depth
    hidden = base_model.forward(draft.input_ids, positions, draft.mask, cache, rows)
    logits = base_model.logits(hidden)
    accepted = rule.accept(draft, logits)
    nodes, counts = accepted.nodes, accepted.counts.cpu()
    cache.commit(rows, nodes.cpu(), counts)
    kept = draft.tokens.gather(1, nodes)
    kept_hidden = hidden.gather(1, nodes[..., None].expand(-1, -1, hidden.shape[-1]))
    state.drafter.observe(rows, kept.cpu(), counts, kept_hidden)
    state.root, state.hidden = accepted.bonus, hidden[torch.arange(len(nodes), device=hidden.device), accepted.last]
    tokens = torch.cat([kept[:, 1:], accepted.bonus[:, None]], dim=1)
    tokens.scatter_(1, accepted.counts[:, None] - 1, accepted.bonus[:, None])
    tokens = tokens.cpu()
    logprobs = {
        row: token_logprobs(logits[row, nodes[row, : counts[row]]], tokens[row, : counts[row]].tolist(), num_top)
        for row, num_top in (scored or {}).items()
    }
    return Step(tokens, counts, draft.num_drafted.cpu(), logprobs)


def _propose(state: DecodeState, muted: Collection[int]) -> Draft:
    if len(muted) == state.num_rows:
        return Draft.of_roots(state.root)
    draft = state.drafter.propose(state.root, state.hidden)
    return draft.without(list(muted)) if muted else draft
