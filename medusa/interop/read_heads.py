"""Heads out of any engine's tensors, found by their names; how many there are is counted, whatever a config says.

{k}.{j}.linear.weight, {k}.{L}.weight          the original's, TGI's, TensorRT-LLM's
medusa_head.{k}...                             the same in MLC's files and in whole models (Medusa-2)
medusa_heads.{k}...                            the same in ModelOpt's merged checkpoints, with scales where FP8
blocks.{k}.layers.{j}.weight, lm_heads.{k}     vLLM's
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .json_files import count
from .plain import Block, PlainHeads
from .tensor_files import AGAIN, TensorFiles

FP8 = torch.float8_e4m3fn
PREFIX = r"(?:medusa_heads?\.)?"
BLOCK = re.compile(PREFIX + r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)")
PROJECTION = re.compile(PREFIX + r"(\d{1,3})\.(\d{1,3})\.weight")
SCALE = re.compile(PREFIX + r"\d{1,3}\.\d{1,3}(?:\.linear)?\.(?:input_scale|weight_scale)")
VLLM_BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
VLLM_PROJECTION = re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d{1,3})\.weight")
TOKEN_MAP = "token_map"

Place = tuple[int, int]  # head, layer


@dataclass
class Found:
    """Names of a checkpoint's tensors by what they are. others: what is no part of heads."""

    blocks: dict[Place, dict[str, str]] = field(default_factory=dict)
    projections: dict[int, str] = field(default_factory=dict)
    projection_layers: dict[int, int] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @classmethod
    def sort(cls, names: TensorFiles, config: Mapping[str, Any]) -> Found:
        found = cls()
        for name in names:
            if match := BLOCK.fullmatch(name) or VLLM_BLOCK.fullmatch(name):
                found.blocks.setdefault((int(match[1]), int(match[2])), {})[match[3]] = name
            elif match := PROJECTION.fullmatch(name):
                found.projections[int(match[1])] = name
                found.projection_layers[int(match[1])] = int(match[2])
            elif match := VLLM_PROJECTION.fullmatch(name):
                found.projections[int(match[1])] = name
            elif not SCALE.fullmatch(name) and name != TOKEN_MAP:
                found.others.append(name)
        if found.others == ["lm_head.weight"] and config.get("original_lm_head") is True and not found.projections:
            found.projections[0] = found.others.pop()
        return found


@dataclass(frozen=True)
class ReadHeads:
    """draft_token_ids: ascending, None for all tokens. whole_model: names of the tensors of a base in the same
    checkpoint."""

    plain: PlainHeads
    draft_token_ids: Tensor | None
    whole_model: list[str]
    notes: list[str]


def read_heads(files: TensorFiles, config: dict[str, Any], where: Path) -> ReadHeads:
    """where: the config's file, for messages. Raises ValueError for tensors that make no heads."""
    found = Found.sort(files, config)
    num_heads, num_layers = _count(files.folder, found)
    notes = _differences(config, where, num_heads, num_layers)
    blocks = tuple(tuple(_block(files, found, (k, j)) for j in range(num_layers)) for k in range(num_heads))
    if not any("bias" in names for names in found.blocks.values()):
        notes.append("the blocks have no biases; written as zeros")
    projections = [_weight(files, found.projections[k]) for k in sorted(found.projections)]
    ids = None
    if TOKEN_MAP in files:
        ids, projections = _narrowed(files, projections)
    size = int(blocks[0][0][0].shape[0])
    _check_shapes(files.folder, blocks, projections, size)
    if any(SCALE.fullmatch(name) for name in files):
        notes.append("FP8 weights were multiplied by their scales; written as bfloat16")
    plain = PlainHeads(blocks, tuple(projections), files.metadata)
    if others := _unexpected(found, config):
        raise ValueError(f"{files.folder}: got tensor {others[0]}, which is no part of Medusa heads; {AGAIN}")
    return ReadHeads(plain, ids, found.others, notes)


def _count(folder: Path, found: Found) -> tuple[int, int]:
    if not found.blocks:
        shown = ", ".join(found.others[:3]) or "nothing"
        raise ValueError(f"{folder}: got no tensors of Medusa heads (but {shown}), expected names as 0.0.linear.weight")
    num_heads = 1 + max(k for k, _ in found.blocks)
    num_layers = 1 + max(j for _, j in found.blocks)
    for k in range(num_heads):
        for j in range(num_layers):
            parts = found.blocks.get((k, j), {})
            with_bias = any("bias" in names for names in found.blocks.values())
            for part in ("weight", "bias")[: 1 + with_bias]:
                if part not in parts:
                    raise ValueError(f"{folder}: got no {part} of head {k}, layer {j}, expected {num_heads} heads of "
                                     f"{num_layers} layers each, as the others have; {AGAIN}")  # fmt: skip
    have = sorted(found.projections)
    if have not in ([], [0], list(range(num_heads))):
        raise ValueError(f"{folder}: got projections of heads {have}, expected of all {num_heads}, or of none; {AGAIN}")
    if found.projection_layers and num_heads > 1 and have == [0]:
        raise ValueError(f"{folder}: got the projection of head 0 only, expected of all {num_heads} heads; {AGAIN}")
    if wrong := [k for k, layer in found.projection_layers.items() if layer != num_layers]:
        name = found.projections[wrong[0]]
        raise ValueError(f"{folder}: got a projection {name} behind {num_layers} layers, expected number {num_layers}")
    return num_heads, num_layers


def _differences(config: dict[str, Any], where: Path, num_heads: int, num_layers: int) -> list[str]:
    """Raises ValueError for counts that are none."""
    nested = config.get("medusa", {})
    if not isinstance(nested, dict):
        raise ValueError(f"{where}: got medusa {nested!r}, expected an object; {AGAIN}")
    notes = []
    is_vllm = config.get("model_type") == "medusa"
    layers = ("medusa_num_layers", "num_medusa_layers", *(["num_hidden_layers"] if is_vllm else []))
    heads = ("medusa_num_heads", "num_medusa_heads", *(["num_heads"] if is_vllm else []))
    for names, got, what in ((heads, num_heads, "heads"), (layers, num_layers, "layers a head")):
        for owner in (config, nested):
            said = [count(owner, name, where) for name in names]
            notes += [
                f"{where.name} says {number} {what}, the tensors are {got}: the tensors are right"
                for number in said
                if number not in (None, got)
            ]
    return notes


def _block(files: TensorFiles, found: Found, place: Place) -> Block:
    names = found.blocks[place]
    weight = _weight(files, names["weight"])
    bias = files.floats(names["bias"]) if "bias" in names else torch.zeros(len(weight), dtype=weight.dtype)
    return weight, bias if bias.dtype == weight.dtype else _same(files, names["bias"], bias, weight)


def _same(files: TensorFiles, name: str, bias: Tensor, weight: Tensor) -> Tensor:
    """A bias beside a weight that was FP8. Raises ValueError for a mixture that a file should not have."""
    if f"{name.removesuffix('.bias')}.weight_scale" not in files:
        raise ValueError(
            f"{files.files[name]}: got tensor {name} as {bias.dtype}, expected {weight.dtype} as the others"
        )
    return bias.to(weight.dtype)


def _weight(files: TensorFiles, name: str) -> Tensor:
    """A float matrix; FP8 with its scale becomes bfloat16."""
    scale = f"{name.removesuffix('.weight')}.weight_scale"
    if scale not in files:
        return _matrix(files, name, files.floats(name))
    raw, factor = files.raw(name), files.floats(scale).float()
    if raw.dtype != FP8 or factor.numel() != 1:
        raise ValueError(
            f"{files.files[name]}: got {name} as {raw.dtype} with {factor.numel()} scales, expected float8_e4m3fn with "
            "one; export from ModelOpt without quantization"
        )
    weight = (_matrix(files, name, raw).float() * factor.reshape(())).to(torch.bfloat16)
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{files.files[name]}: got NaN or infinity in tensor {name}, expected numbers; {AGAIN}")
    return weight


def _matrix(files: TensorFiles, name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() != 2 or not tensor.numel():
        raise ValueError(f"{files.files[name]}: got tensor {name} as {list(tensor.shape)}, expected a matrix; {AGAIN}")
    return tensor


def _narrowed(files: TensorFiles, projections: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """vLLM's pruned vocabulary: ids, ascending, and rows in their order."""
    ids = files.raw(TOKEN_MAP)
    path = files.files[TOKEN_MAP]
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1 or not len(ids):
        raise ValueError(f"{path}: got token_map {ids.dtype} {list(ids.shape)}, expected a row of token ids; {AGAIN}")
    order = ids.long().argsort()
    ids = ids.long()[order]
    if int(ids[0]) < 0 or bool((ids[1:] == ids[:-1]).any()):
        raise ValueError(f"{path}: got a token_map with a token below 0 or twice, expected ids of the base; {AGAIN}")
    if any(len(weight) != len(ids) for weight in projections):
        raise ValueError(f"{path}: got a token_map of {len(ids)} tokens, expected one for each projection row; {AGAIN}")
    return ids, [weight[order] for weight in projections]


def _check_shapes(folder: Path, blocks: tuple[tuple[Block, ...], ...], projections: list[Tensor], size: int) -> None:
    dtypes = {tensor.dtype for head in blocks for block in head for tensor in block} | {p.dtype for p in projections}
    if len(dtypes) > 1:
        raise ValueError(
            f"{folder}: got tensors of {' and '.join(sorted(map(str, dtypes)))}, expected one type; {AGAIN}"
        )
    for k, head in enumerate(blocks):
        for j, (weight, bias) in enumerate(head):
            if tuple(weight.shape) != (size, size) or tuple(bias.shape) != (size,):
                raise ValueError(
                    f"{folder}: got head {k}, layer {j} as {list(weight.shape)} and {list(bias.shape)}, expected "
                    f"{[size, size]} and {[size]} as head 0 has; {AGAIN}"
                )
    for weight in projections:
        if weight.dim() != 2 or weight.shape != projections[0].shape or weight.shape[1] != size:
            raise ValueError(
                f"{folder}: got a projection {list(weight.shape)}, expected {[len(projections[0]), size]}; {AGAIN}"
            )


def _unexpected(found: Found, config: Mapping[str, Any]) -> list[str]:
    """Tensors beside the heads, where there should be none: only a whole model has others."""
    is_whole = config.get("model_type") not in (None, "medusa") and len(found.others) > 1
    return [] if is_whole else found.others
