"""The tensors of a directory, by name, from files that nobody vouches for. Nothing in them is ever executed.

safetensors, with or without an index, or PyTorch's own files, which `torch.load` reads as data only. Every name in an
index stays inside the directory, every tensor is dense, finite and a float or an id.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .json_files import parse_object, read_object

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
INDEXES = ("model.safetensors.index.json", "medusa_lm_head.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLES = ("medusa_lm_head.pt", "pytorch_model.bin")  # looked for in this order where there are no safetensors
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
AGAIN = "download or export it again"


@dataclass(frozen=True)
class TensorFiles:
    """files: which file holds which tensor. metadata: of all safetensors files together. pickled: tensors of PyTorch's
    own files, mapped from there."""

    folder: Path
    files: Mapping[str, Path]
    metadata: Mapping[str, str] = field(default_factory=dict)
    pickled: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> TensorFiles:
        """Raises ValueError for a directory without tensors, for damaged files and for an index that does not fit."""
        index = next((folder / name for name in INDEXES if (folder / name).exists()), None)
        expected = read_index(index) if index else None
        if expected is not None:
            paths = sorted({member(folder, name) for name in expected.values()})
        else:
            paths = [member(folder, path.name) for path in sorted(folder.glob("*.safetensors"))]
            paths = paths or [member(folder, name) for name in PICKLES if (folder / name).exists()][:1]
        if not paths:
            raise ValueError(f"{folder}: got no *.safetensors and no {' or '.join(PICKLES)}, expected tensors; {AGAIN}")
        files: dict[str, Path] = {}
        metadata: dict[str, str] = {}
        pickled: dict[str, Tensor] = {}
        for path in paths:
            if path.suffix == ".safetensors":
                names, extra = read_header(path)
                metadata |= extra
            else:
                names = list(content := load_pickle(path))
                pickled |= content
            for name in names:
                if name in files:
                    raise ValueError(f"{folder}: got tensor {name} in {files[name].name} and in {path.name}; {AGAIN}")
                files[name] = path
        for name, shard in (expected or {}).items():
            if files.get(name) != folder / shard:
                raise ValueError(f"{index}: says that {shard} holds {name}, which it does not; {AGAIN}")
        return cls(folder, files, metadata, pickled)

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def view(self, name: str) -> Tensor:
        """As it is in the file, unchecked; may be mapped from there, so that a few values of it cost no more."""
        path = self.files[name]
        if path.suffix != ".safetensors":
            return self.pickled[name]
        with _opened(path) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def raw(self, name: str) -> Tensor:
        """A plain tensor of any type, in memory of its own. Raises ValueError for other kinds."""
        tensor = self.view(name)
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not is_plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{self.files[name]}: got tensor {name} sparse, quantized, repeated or without data, expected a plain "
                f"one; {AGAIN}"
            )
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def floats(self, name: str) -> Tensor:
        """A float tensor. Raises ValueError for another type, and for NaN or infinity."""
        tensor = self.raw(name)
        if tensor.dtype not in FLOATS:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in FLOATS)
            raise ValueError(f"{self.files[name]}: got tensor {name} of {tensor.dtype}, expected one of {kinds}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{self.files[name]}: got NaN or infinity in tensor {name}, expected numbers; {AGAIN}")
        return tensor


def member(folder: Path, name: Any) -> Path:
    """The file of that name in `folder`, which may be a link only into the same Hub cache entry. Raises ValueError for
    a name or a link that leads elsewhere, or to no file."""
    if not isinstance(name, str) or not name or name in (".", "..") or Path(name).name != name or "\\" in name:
        raise ValueError(f"{folder}: got the file name {name!r}, expected one in the same directory; do not trust it")
    path = folder / name
    target, root = path.resolve(), folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(f"{path}: got a link out of the directory, to {target}, expected a file; copy the file there")
    if not target.is_file():
        raise ValueError(f"{folder}: got no file {name}, expected it; {AGAIN}")
    return path


def read_index(path: Path) -> dict[str, str]:
    """An index's `weight_map`. Raises ValueError for one of wrong types."""
    weights = read_object(member(path.parent, path.name)).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise ValueError(f"{path}: got no weight_map of tensor names to file names, expected one; {AGAIN}")
    return weights


def read_header(path: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the tensors in a safetensors file, and its metadata. Raises ValueError for a damaged file."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{path}: got a header of {length:,} bytes in a file of {size:,}, expected a complete safetensors "
                f"file; {AGAIN}"
            )
        header = parse_object(file.read(length), f"{path} (header)")
    extra = header.pop("__metadata__", {})
    if not isinstance(extra, dict) or not all(isinstance(value, str) for value in extra.values()):
        raise ValueError(f"{path}: got metadata {str(extra)[:80]}, expected strings; {AGAIN}")
    with _opened(path) as file:  # checks shapes, offsets and the length
        return list(file.keys()), extra


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: got a file that is no complete safetensors file ({error}), expected tensors; {AGAIN}"
        ) from error


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors by name from PyTorch's own file, mapped where it can be. Raises ValueError for anything else in it."""
    is_zip = zipfile.is_zipfile(path)
    try:
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("its parts are compressed, which PyTorch's own never are")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about protocols and storages that are nothing to the reader of heads
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # whatever a reader of arbitrary bytes trips over
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{path}: got a file that torch.load(weights_only=True) refuses ({reason[:160]}), expected tensors by name "
            "and nothing else; code in it was not run"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path}: got a {type(content).__name__}, expected tensors by name; {AGAIN}")
    if wrong := [name for name, value in content.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{path}: got {wrong[0]!r}, a {type(content[wrong[0]]).__name__}, expected a tensor; {AGAIN}")
    return content
