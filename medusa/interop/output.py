"""A directory that appears whole or not at all, and tensors in files of a size that hubs and engines like."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .json_files import write_object

MAX_SHARD_BYTES = 5_000_000_000


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary directory beside `target` that becomes it at the end, or is removed where anything is raised.

    Raises ValueError where `target` is a file or a directory that holds something.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: got something there already, expected nothing or an empty directory; remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        for path in unfinished.rglob("*"):
            _sync(path)
        unfinished.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def save_tensors(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    max_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """`<stem>.safetensors`, or where that would pass `max_bytes` its shards and their index, named as Transformers
    does. Tensors that share memory are written out each."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        _save(folder / f"{stem}.safetensors", shards[0], metadata)
        return
    names = [f"{stem}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        _save(folder / file, shard, metadata)
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_object(
        folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    seen: set[int] = set()
    alone = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        alone[name] = tensor.contiguous() if place not in seen else tensor.clone(memory_format=torch.contiguous_format)
        seen.add(place)
    save_file(alone, path, metadata=dict(metadata))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
