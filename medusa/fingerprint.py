"""Fingerprints of a base model: a cheap one that tells models apart, and a full one that proves a model unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .linear import FastLinear

SAMPLES_PER_TENSOR = 64
CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)


def fingerprint(model: Any) -> str:
    """sha256 (hex) over the config's shapes and some values of each parameter; milliseconds for billions of weights.

    Values are rounded to bfloat16, so that float32 and bfloat16 loads of one checkpoint agree (float16 may not).
    Names and order of parameters do not count: they move between Transformers releases. Take it before any packing.
    """
    assert not any(isinstance(module, FastLinear) for module in model.modules()), "fingerprint before pack_linears"
    shapes = {name: getattr(model.config, name, None) for name in CONFIG_FIELDS}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode())
    for part in sorted(sample_digest(parameter) for parameter in model.parameters()):
        digest.update(part)
    return digest.hexdigest()


def full_fingerprint(model: nn.Module) -> str:
    """sha256 (hex) over every parameter and saved buffer, bit for bit: equal before and after means untouched."""
    return tensors_fingerprint(own_tensors(model))


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name. What else a state dict holds is left out: bitsandbytes rounds its scales
    anew now and then."""
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    own = dict(parameters).keys() | dict(buffers).keys()
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in own}


@torch.no_grad()
def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """sha256 (hex) over names, dtypes, shapes and every bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


@torch.no_grad()
def sample_digest(tensor: Tensor) -> bytes:
    """Of a parameter's shape and some of its values."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // SAMPLES_PER_TENSOR)
    sample = flat[::stride][:SAMPLES_PER_TENSOR].to(torch.bfloat16)
    return hashlib.sha256(f"{list(tensor.shape)}".encode() + _bytes(sample)).digest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().data
