"""The decoding loop's body: prefill a row, then propose, verify, accept, commit, over and over.

One batched, ragged step is the only implementation. Plain generation, streaming, distillation, the benchmark and the
autoregressive baseline (a tree that is only its root) are drivers of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.acceptance import GREEDY, AcceptanceRule
from medusa.base_model import BaseModel
from medusa.drafter import Drafter
from medusa.kv_cache import KVCache

PREFILL_CHUNK = 512


@dataclass
class DecodeState:
    """The live rows `0..B-1` of a cache and of a drafter, and what the next step starts from.

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
        self.root, self.hidden = torch.cat([self.root, root]), torch.cat([self.hidden, hidden])

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = self.num_rows - 1
        if row != last:
            self.cache.move_row(last, row)
            self.drafter.move_row(last, row)
            self.root[row], self.hidden[row] = self.root[last], self.hidden[last]
        self.cache.clear_row(last)
        self.drafter.clear_row(last)
        self.root, self.hidden = self.root[:last], self.hidden[:last]


@dataclass(frozen=True)
class Step:
    """What a step gave, on the CPU: row b emits `tokens[b, :counts[b]]`, accepted draft tokens first and the bonus
    token last, of `num_drafted[b]` that were drafted. tokens: int64 [B, L]; the others int64 [B]."""

    tokens: Tensor
    counts: Tensor
    num_drafted: Tensor


@torch.inference_mode()
def prefill(base_model: BaseModel, state: DecodeState, prompt_ids: list[int], rule: AcceptanceRule = GREEDY) -> None:
    """Add a row that holds the prompt, in chunks; its root is the base's choice of a first token."""
    row = slice(state.num_rows, state.num_rows + 1)
    state.cache.clear_row(row.start)
    state.drafter.clear_row(row.start)
    for start in range(0, len(prompt_ids), PREFILL_CHUNK):
        chunk = torch.tensor([prompt_ids[start : start + PREFILL_CHUNK]])
        nodes, count = torch.arange(chunk.shape[1])[None], torch.tensor([chunk.shape[1]])
        mask = torch.ones(chunk.shape[1], chunk.shape[1], dtype=torch.bool).tril()
        on_device, positions = chunk.to(base_model.device), (start + nodes).to(base_model.device)
        hidden = base_model.forward(on_device, positions, mask, state.cache, row)
        state.cache.commit(row, nodes, count)
        state.drafter.observe(row, chunk, count, hidden)
    last = hidden[:, -1]
    state.append(rule.first(base_model.logits(last), row.start), last)


@torch.inference_mode()
def decode_step(base_model: BaseModel, state: DecodeState, rule: AcceptanceRule = GREEDY) -> Step:
    """One step of every live row."""
    rows, cache = state.rows, state.cache
    draft = state.drafter.propose(state.root, state.hidden)
    positions = cache.lengths[rows, None].to(draft.depth.device) + draft.depth
    hidden = base_model.forward(draft.input_ids, positions, draft.mask, cache, rows)
    accepted = rule.accept(draft, base_model.logits(hidden))
    nodes, counts = accepted.nodes, accepted.counts.cpu()
    cache.commit(rows, nodes.cpu(), counts)
    kept = draft.tokens.gather(1, nodes)
    kept_hidden = hidden.gather(1, nodes[..., None].expand(-1, -1, hidden.shape[-1]))
    state.drafter.observe(rows, kept.cpu(), counts, kept_hidden)
    state.root, state.hidden = accepted.bonus, hidden[torch.arange(len(nodes), device=hidden.device), accepted.last]
    tokens = torch.cat([kept[:, 1:], accepted.bonus[:, None]], dim=1)
    tokens.scatter_(1, accepted.counts[:, None] - 1, accepted.bonus[:, None])
    return Step(tokens.cpu(), counts, draft.num_drafted.cpu())
