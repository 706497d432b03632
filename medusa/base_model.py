"""The base model behind one small adapter: a stock Transformers model, its tokenizer, and how a tree passes through.

Everything that moves between Transformers releases or differs between model families is in this file: the cache
argument's name, mask kinds for sliding windows, the attention implementation, what a model does to its logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .attention import TREE_ATTENTION
from .kv_cache import KVCache

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class BaseModel:
    """A causal language model being accelerated. The engine owns `model`; nothing is ever written onto it but by
    `medusa.linear.pack_linears` and `medusa.linear_groups.group_linears`, on request.

    fused_layers: layers (the first is 1) whose outputs are part of a token's state, for heads that look at them. A
    state is then [(1 + F) x D], the final-norm hidden state first.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None = None
    fused_layers: tuple[int, ...] = ()

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def hidden_size(self) -> int:
        return int(self.model.get_output_embeddings().in_features)

    @property
    def state_size(self) -> int:
        """Numbers of a token's state."""
        return self.hidden_size * (1 + len(self.fused_layers))

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().out_features)

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D], as loaded; gone once `pack_linears` has packed it."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    @property
    def embedding_weight(self) -> Tensor:
        """[V, D], the table of input embeddings."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def lm_head_bias(self) -> Tensor | None:
        """[V]; most families have none."""
        bias: Tensor | None = getattr(self.model.get_output_embeddings(), "bias", None)
        return None if bias is None else bias.detach()

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def max_positions(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 30)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end an answer: the generation config's, else the model's or the tokenizer's."""
        for owner in (getattr(self.model, "generation_config", None), self.config, self.tokenizer):
            ids = getattr(owner, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @cached_property
    def cache_argument(self) -> str:
        """`past_key_values` became `cache` in Transformers 5.24."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @cached_property
    def window(self) -> int | None:
        """Tokens a sliding layer sees, itself included; None where no layer slides."""
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        return window if window and (kinds is None or "sliding_attention" in kinds) else None

    def fuse_layers(self, layers: tuple[int, ...]) -> None:
        """Make their outputs part of every state. Raises ValueError for layers that the model has not."""
        num_layers = self.config.num_hidden_layers
        # The last layer's output is the last hidden state before its norm: nothing new.
        if wrong := [layer for layer in layers if not 1 <= layer < num_layers]:
            raise ValueError(
                f"fused_layers: got layer {wrong[0]} of the base model {self.name!r}, expected 1 to {num_layers - 1}"
            )
        self.fused_layers = layers

    @property
    def _folds_groups(self) -> bool:
        return bool(self.config._attn_implementation == TREE_ATTENTION)

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return KVCache(self.config.num_hidden_layers, num_rows, capacity)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """States [B, T, D], final-norm hidden ones, of whole right-padded sequences [B, T], without the lm_head's cost.

        With gradients where an adapter's parameters want them; a frozen base has none.
        """
        return self._states(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)

    def _states(self, **arguments: Any) -> Tensor:
        """A stock forward without the lm_head: [B, N, D], or [B, N, (1 + F) x D] with fused layers."""
        if not self.fused_layers:
            last: Tensor = self.model.base_model(**arguments).last_hidden_state
            return last
        output = self.model.base_model(**arguments, output_hidden_states=True)
        fused = [output.hidden_states[layer] for layer in self.fused_layers]
        return torch.cat([output.last_hidden_state, *fused], dim=-1)

    def packed_hidden_states(self, input_ids: Tensor, documents: Tensor) -> Tensor:
        """States [B, T, D] of rows that hold several sequences, each as if it were alone.

        input_ids: int64 [B, T]. documents: int64 [B, T], one number for the tokens of a sequence, which lie behind each
        other; padding is a sequence like others. Attention ends and positions restart where the number changes.
        """
        slots = torch.arange(input_ids.shape[1], device=input_ids.device)
        is_first = torch.ones_like(documents, dtype=torch.bool)
        is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        positions = slots - slots.where(is_first, 0).cummax(dim=1).values
        distance = slots[:, None] - slots
        visible = (documents[:, :, None] == documents[:, None]) & (distance >= 0)
        # A boolean mask goes to the stock attention; the folded float one of a tree would be `groups` times as large.
        kind = self._bool_mask if self._folds_groups else self._float_mask
        mask = self._by_layer_kind(visible, distance, kind)
        return self._states(input_ids=input_ids, position_ids=positions, attention_mask=mask, use_cache=False)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, tree_mask: Tensor, cache: KVCache, rows: slice) -> Tensor:
        """States [B, N, D] of N new tokens behind the cached ones.

        input_ids and positions: int64 [B, N]. tree_mask: bool [N, N] or [B, N, N], which new tokens see which.
        `cache` holds the new keys and values until `cache.commit` says which stay.
        """
        width = cache.begin_forward(rows, input_ids.shape[1])
        mask = self._mask(positions, tree_mask, cache.lengths[rows], width)
        arguments = {self.cache_argument: cache, "use_cache": True}
        return self._states(input_ids=input_ids, position_ids=positions, attention_mask=mask, **arguments)

    def probe(self) -> Tensor:
        """Logits of a few tokens through `forward`: float32 [1, 3, V]."""
        ids = _probe_ids(self)
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        hidden = self.forward(ids, positions, mask, self.new_cache(1, ids.shape[1]), slice(0, 1))
        return self.logits(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """States [..., D or more] -> [..., V]."""
        return self.finish_logits(self.model.get_output_embeddings()(hidden[..., : self.hidden_size]))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Whatever the family does to its logits after the projection."""
        if scale := getattr(self.config, "logits_scaling", None):  # Granite divides
            logits = logits / scale
        if scale := getattr(self.config, "logit_scale", None):  # Cohere multiplies
            logits = logits * scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _mask(self, positions: Tensor, tree_mask: Tensor, lengths: Tensor, width: int) -> Any:
        """Float masks [B, 1, N (x groups), width + N], one or a dict by layer kind, 0 where seen, -inf elsewhere."""
        batch, num_tokens = positions.shape
        lengths = lengths.to(positions.device)
        slots = torch.arange(width, device=positions.device)
        context = (slots < lengths[:, None])[:, None].expand(batch, num_tokens, width)
        visible = torch.cat([context, tree_mask.to(positions.device).expand(batch, -1, -1)], dim=-1)
        key_positions = torch.cat([slots.expand(batch, width), positions], dim=-1)
        return self._by_layer_kind(visible, positions[:, :, None] - key_positions[:, None], self._float_mask)

    def _by_layer_kind(self, visible: Tensor, distance: Tensor, kind: Callable[[Tensor], Tensor]) -> Any:
        """`kind`'s mask of visible [B, N, S], or a dict of masks by layer kind. distance: int64 [..., N, S], positions
        from a key to its query, for layers that see no further than their window."""
        if self.window is None:
            return kind(visible)
        near = visible & (distance < self.window)
        if "full_attention" in (getattr(self.config, "layer_types", None) or ()):
            return {"full_attention": kind(visible), "sliding_attention": kind(near)}
        return kind(near)

    def _bool_mask(self, visible: Tensor) -> Tensor:
        return visible[:, None]

    def _float_mask(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]
        if self._folds_groups:
            num_heads = self.config.num_attention_heads
            mask = mask.repeat(1, 1, num_heads // (getattr(self.config, "num_key_value_heads", None) or num_heads), 1)
        return mask


def load_base_model(
    name_or_path: str,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> BaseModel:
    """Load a stock Transformers model and its tokenizer, frozen, ready for tree decoding.

    token, local_files_only: as Transformers has them.
    quantization: "nf4", linear layers in 4 bits (bitsandbytes; QLoRA, Dettmers et al., 2023), products in `dtype`.
    Raises ValueError for a name that cannot be loaded, an unknown dtype, or a family that a tree cannot pass through.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    options |= {"token": token, "local_files_only": local_files_only}
    device = as_device(device)
    in_4_bits = {} if quantization is None else _quantized(quantization, as_dtype(dtype), device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=as_dtype(dtype), **options, **in_4_bits)
    except (OSError, ValueError, KeyError) as error:
        where = (
            "a local directory" if Path(name_or_path).exists() else "no local directory of that name, nor a Hub model"
        )
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"base model {name_or_path!r} cannot be loaded ({where}): {reason}") from error
    return adapt_base_model(model.to(device), tokenizer, name=name_or_path, revision=revision)


def _quantized(quantization: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs to load in 4 bits. Raises ValueError without bitsandbytes."""
    if quantization != "nf4":
        raise ValueError(f"quantization {quantization!r} is unknown; expected nf4")
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            "quantization nf4 needs the package bitsandbytes, got none installed; pip install bitsandbytes (meant for "
            "NVIDIA GPUs; it works on a CPU, slowly)"
        )
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": device}}


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def as_device(device: str | torch.device) -> torch.device:
    """Raises ValueError for a device that torch does not know or this machine does not have."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {str(device)!r} is unknown; expected cpu, cuda or cuda:N") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {str(device)!r} is not there: torch sees {torch.cuda.device_count()} GPUs; use cpu")
    return found


def adapt_base_model(model: Any, tokenizer: Any, *, name: str, revision: str | None = None) -> BaseModel:
    """Freeze a loaded model, choose its attention and prove on three tokens that our forward is the stock one.

    Raises ValueError where a layer cannot be rolled back (recurrent state) or the family's logits would differ.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if kinds:
        raise ValueError(
            f"base model {name!r} has layers of kind {', '.join(sorted(kinds))}, whose state cannot be rolled back "
            "after a rejected draft; tree decoding needs full or sliding attention in every layer"
        )
    model.requires_grad_(False).eval()
    base = BaseModel(model, tokenizer, name, revision)
    reference = _probe_stock(base)
    difference = _choose_attention(base, reference)
    # Scaled to the logits: half precision rounds large ones coarsely.
    tolerance = (1e-4 if base.dtype == torch.float32 else 0.1) * max(1.0, reference.abs().max().item())
    if not difference <= tolerance:
        raise ValueError(
            f"base model {name!r} ({type(model).__name__}): logits through the tree path differ from its own forward "
            f"by {difference:.2g} (allowed {tolerance:.2g}); this family is not supported"
        )
    return base


def _choose_attention(base: BaseModel, reference: Tensor) -> float:
    """Set the attention whose logits come nearest to the stock ones; returns the largest difference to them."""
    differences = {}
    for name in _attention_candidates(base.config):
        base.model.set_attn_implementation(name)
        differences[name] = (base.probe() - reference).abs().max().item()
    best = min(differences, key=lambda name: differences[name])
    base.model.set_attn_implementation(best)
    return differences[best]


def _attention_candidates(config: Any) -> list[str]:
    """Our grouped attention where the stock model uses SDPA, else eager, which takes any float mask. Whether SDPA heeds
    a cap on the attention's logits (Gemma 2) differs between Transformers releases: then both are tried."""
    if config._attn_implementation != "sdpa":
        return ["eager"]
    return [TREE_ATTENTION, "eager"] if getattr(config, "attn_logit_softcapping", None) else [TREE_ATTENTION]


def _probe_ids(base: BaseModel) -> Tensor:
    return torch.arange(1, 4, device=base.device)[None] % base.vocab_size


@torch.no_grad()
def _probe_stock(base: BaseModel) -> Tensor:
    return base.model(input_ids=_probe_ids(base), use_cache=False).logits.float()
