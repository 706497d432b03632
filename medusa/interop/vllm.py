"""Our heads as vLLM's drafter, of any design, from 0.22 on, 0.33 included, where the built-in Medusa is gone:

    vllm serve BASE --speculative-config '{"method": "custom_class", "num_speculative_tokens": K,
        "model": "medusa.interop.vllm.MedusaProposer"}' --additional-config '{"medusa_heads": "HEADS"}'

or with the environment variable MEDUSA_HEADS. Nothing of vLLM is imported: it brings all that is needed. Chains only,
as all of vLLM's drafters; not with fused layers, whose states vLLM does not hand out.

vLLM tells a custom class which tokens were sampled, not from which states. So the states are taken where the target
turns them into logits: one row for each request and each token that was drafted for it. Nor does it say how many of the
drafted tokens were verified, and it may trim drafts when it runs short. Rows are therefore accounted for by what was
proposed, and where the sums do not agree nothing is drafted in that step, which the next one can rely on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import HeadsInfo, load_heads
from ..heads import Heads
from ..heads_drafter import HeadGuesses
from ..hub import find_heads
from .base_files import base_folder, files_fingerprint, read_ends

SETTING = "medusa_heads"
VARIABLE = "MEDUSA_HEADS"
KEY_TOKENS = 32
MAX_REMEMBERED = 65_536

Key = tuple[int, tuple[int, ...]]  # length of a text and its last tokens


class MedusaProposer:
    """vLLM calls the constructor, `load_model` once, and `propose` after each step, on every rank alike.

    num_skipped: steps without drafts because the rows did not add up. Raises ValueError for heads that are not there
    or do not fit.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.model_config = vllm_config.model_config
        self.max_length = int(self.model_config.max_model_len)
        self.heads, self.info = _load(vllm_config, self.num_tokens)
        self.num_skipped = 0
        self._states: list[Tensor] = []
        self._num_drafted: dict[Key, int] = {}

    def load_model(self, target_model: Any, *_: Any, **__: Any) -> None:
        """Take what heads need of the base from its files: `target_model` may hold only a slice of it."""
        device = next(target_model.parameters()).device
        folder = base_folder(str(self.model_config.model), getattr(self.model_config, "revision", None))
        if files_fingerprint(folder) != self.info.base_model.fingerprint:
            warnings.warn(
                f"{folder} is not, or not known to be, {self.info.base_model.name}, which the heads were trained on; "
                "answers stay right, but if it is another model, few drafts will be accepted",
                stacklevel=2,
            )
        lm_head, embeddings = read_ends(folder)
        dtype = self.model_config.dtype
        self.heads = self.heads.to(device=device, dtype=dtype).requires_grad_(False).eval()
        self.heads.attach_base(lm_head.to(device, dtype), embeddings.to(device, dtype))
        compute_logits = target_model.compute_logits

        def watched(hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
            self._states.append(hidden_states)
            return compute_logits(hidden_states, *arguments, **options)

        target_model.compute_logits = watched

    def dummy_run(self, *_: Any, **__: Any) -> None:
        """Heads have nothing to warm up."""
        self._states.clear()

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of at most `num_tokens` for each request; none where nothing was sampled.

        sampled_token_ids[i]: tokens that request i gained, accepted ones first. num_tokens_no_spec[i]: length of its
        text. token_ids_cpu: int [requests or more, longest], the texts.
        """
        sampled = [[int(token) for token in tokens] for tokens in sampled_token_ids]
        before = [_text(token_ids_cpu[i], int(num_tokens_no_spec[i]), tokens) for i, tokens in enumerate(sampled)]
        drafted = [self._num_drafted.get(key, 0) for key in before]
        states = self._take_states(drafted, sampled)
        drafts: list[list[int]] = [[] for _ in sampled]
        after = [_extend(key, tokens) for key, tokens in zip(before, sampled, strict=True)]
        active = [i for i, tokens in enumerate(sampled) if tokens and states is not None]
        if active:
            assert states is not None
            roots = torch.tensor([sampled[i][-1] for i in active], device=states.device)
            guesses = self._chain(states[active], roots).tolist()
            for i, tokens in zip(active, guesses, strict=True):
                # vLLM itself cuts what would pass the longest length: better not to draft it.
                drafts[i] = tokens[: max(0, self.max_length - 1 - after[i][0])]
        self._remember(after, drafts)
        return drafts

    def _take_states(self, drafted: list[int], sampled: list[list[int]]) -> Tensor | None:
        """[requests, D]: the state that chose each request's last token; None where the rows do not add up."""
        num_rows = sum(drafted) + len(drafted)
        fitting = [states for states in self._states if states.shape[0] == num_rows]
        self._states.clear()
        if not fitting or any(len(tokens) > count + 1 for tokens, count in zip(sampled, drafted, strict=True)):
            self.num_skipped += 1
            return None
        rows, start = [], 0
        for count, tokens in zip(drafted, sampled, strict=True):
            rows.append(start + max(len(tokens), 1) - 1)
            start += count + 1
        return fitting[-1][torch.tensor(rows, device=fitting[-1].device)]

    def _chain(self, states: Tensor, roots: Tensor) -> Tensor:
        """states [n, D], roots int64 [n] -> int64 [n, num_tokens], each head's best guess below those before."""
        guesses, tokens = HeadGuesses(self.heads, self.heads.fuse(states.to(self.heads.dtype))), roots[:, None]
        for head in range(self.num_tokens):
            best = guesses.logits(head, tokens[:, None])[:, 0].argmax(dim=-1)
            tokens = torch.cat([tokens, self.heads.draft_to_base(best)[:, None]], dim=1)
        return tokens[:, 1:]

    def _remember(self, keys: list[Key], drafts: list[list[int]]) -> None:
        for key, draft in zip(keys, drafts, strict=True):
            self._num_drafted.pop(key, None)  # the newest stand last
            self._num_drafted[key] = len(draft)
        while len(self._num_drafted) > MAX_REMEMBERED:
            del self._num_drafted[next(iter(self._num_drafted))]


def _load(vllm_config: Any, num_tokens: int) -> tuple[Heads, HeadsInfo]:
    place = (getattr(vllm_config, "additional_config", None) or {}).get(SETTING) or os.environ.get(VARIABLE)
    if not place:
        raise ValueError(
            f'MedusaProposer: got no heads, expected --additional-config \'{{"{SETTING}": "DIR"}}\' or {VARIABLE}=DIR'
        )
    heads, info = load_heads(find_heads(place))
    if heads.config.fused_layers:
        raise ValueError(
            f"MedusaProposer: got heads with fused layers in {place}, whose states vLLM does not hand out; train with "
            "heads.fused_layers=[], or use `medusa serve`"
        )
    if num_tokens > heads.config.num_heads:
        raise ValueError(
            f"MedusaProposer: got num_speculative_tokens {num_tokens}, expected at most the {heads.config.num_heads} "
            f"heads in {place}"
        )
    return heads, info


def _text(tokens: Any, length: int, sampled: list[int]) -> Key:
    """Of a request before this step's tokens, which may or may not be part of its text already."""
    end = [int(token) for token in tokens[max(0, length - KEY_TOKENS - len(sampled)) : length]]
    if sampled and end[-len(sampled) :] == sampled:
        end, length = end[: -len(sampled)], length - len(sampled)
    return length, tuple(end[-KEY_TOKENS:])


def _extend(key: Key, tokens: list[int]) -> Key:
    return key[0] + len(tokens), (*key[1], *tokens)[-KEY_TOKENS:]
