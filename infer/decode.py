"""The decoding loop's body: prefill a row, then propose, verify, accept, commit, over and over.

One batched, ragged step is the only implementation. Plain generation, streaming, distillation, the benchmark and the
autoregressive baseline (a tree that is only its root) are drivers of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.acceptance import accept
from medusa.base_model import BaseModel
from medusa.drafter import Drafter
from medusa.kv_cache import KVCache

PREFILL_CHUNK = 512

# The base's own choice at each position: logits [..., V] -> token ids [...].
Choose = Callable[[Tensor], Tensor]


def choose_best(logits: Tensor) -> Tensor:
    """Greedy decoding."""
    return logits.argmax(dim=-1)


@dataclass
class DecodeState:
    """The live rows `0..B-1` of a cache, and what the next step starts from.

    root: int64 [B], tokens chosen by the base and not yet in the cache. hidden: [B, D], the states that chose them.
    """

    cache: KVCache
    root: Tensor
    hidden: Tensor

    @property
    def num_rows(self) -> int:
        return int(self.root.shape[0])

    @property
    def rows(self) -> slice:
        return slice(0, self.num_rows)

    @classmethod
    def empty(cls, base_model: BaseModel, cache: KVCache) -> DecodeState:
        device = base_model.device
        hidden = torch.empty(0, base_model.hidden_size, dtype=base_model.dtype, device=device)
        return cls(cache, torch.empty(0, dtype=torch.int64, device=device), hidden)

    @torch.inference_mode()
    def append(self, root: Tensor, hidden: Tensor) -> None:
        self.root, self.hidden = torch.cat([self.root, root]), torch.cat([self.hidden, hidden])

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = self.num_rows - 1
        if row != last:
            self.cache.move_row(last, row)
            self.root[row], self.hidden[row] = self.root[last], self.hidden[last]
        self.cache.clear_row(last)
        self.root, self.hidden = self.root[:last], self.hidden[:last]


@torch.inference_mode()
def prefill(base_model: BaseModel, state: DecodeState, prompt_ids: list[int], choose: Choose = choose_best) -> None:
    """Add a row that holds the prompt, in chunks; its root is the base's choice of a first token."""
    row = slice(state.num_rows, state.num_rows + 1)
    state.cache.clear_row(row.start)
    for start in range(0, len(prompt_ids), PREFILL_CHUNK):
        chunk = torch.tensor([prompt_ids[start : start + PREFILL_CHUNK]], device=base_model.device)
        size = chunk.shape[1]
        nodes = torch.arange(size)
        positions = (start + nodes)[None].to(base_model.device)
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        hidden = base_model.forward(chunk, positions, mask, state.cache, row)
        state.cache.commit(row, nodes[None], torch.tensor([size]))
    last = hidden[:, -1]
    state.append(choose(base_model.logits(last)), last)


@torch.inference_mode()
def decode_step(
    base_model: BaseModel, drafter: Drafter, state: DecodeState, choose: Choose = choose_best
) -> tuple[Tensor, Tensor]:
    """One step of every live row. Returns tokens int64 [B, L] and counts int64 [B], on the CPU: row b emits
    `tokens[b, :counts[b]]`, accepted draft tokens first and the bonus token last."""
    tree, rows, cache = drafter.tree, state.rows, state.cache
    draft_tokens = drafter.propose(state.root, state.hidden)
    positions = (cache.lengths[rows, None] + tree.depth).to(draft_tokens.device)
    hidden = base_model.forward(draft_tokens, positions, tree.attention_mask, cache, rows)
    accepted = accept(tree, draft_tokens, choose(base_model.logits(hidden)))
    cache.commit(rows, accepted.nodes.cpu(), accepted.counts.cpu())
    state.root = accepted.bonus
    state.hidden = hidden[torch.arange(state.num_rows, device=hidden.device), accepted.last]
    tokens = torch.cat([draft_tokens.gather(1, accepted.nodes)[:, 1:], accepted.bonus[:, None]], dim=1)
    tokens.scatter_(1, accepted.counts[:, None] - 1, accepted.bonus[:, None])
    return tokens.cpu(), accepted.counts.cpu()
