"""Heads on disk: a directory with `config.json` and `heads.safetensors`. Strict both ways, nothing that executes.

Every difference between what a directory holds and what its config says is a ValueError; nothing is loaded in part.
Files are written beside their place and renamed over it, so a full disk or a kill leaves the old ones whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .conditioned_heads import make_heads
from .config import HeadsConfig
from .heads import Heads

SCHEMA_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "heads.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PICKLE_ENDINGS = {".pt", ".pth", ".bin", ".pkl", ".ckpt"}


@dataclass(frozen=True)
class BaseReference:
    """Which base model heads belong to. `fingerprint`: `medusa.fingerprint.fingerprint` of it."""

    name: str
    fingerprint: str
    revision: str | None = None


@dataclass(frozen=True)
class AdapterReference:
    """Which adapter of the base heads were trained with (Medusa-2). `fingerprint`: of its weights (see adapter.py);
    `merged_fingerprint`: of the base with the adapter merged into it."""

    fingerprint: str
    merged_fingerprint: str


@dataclass(frozen=True)
class HeadsInfo:
    """What a heads directory says beside the tensors. `tree`: name of the default tree's file in the directory.
    `adapter`: None where the base is used as it is (Medusa-1)."""

    base_model: BaseReference
    tree: str = "tree.json"
    adapter: AdapterReference | None = None


def save_heads(folder: str | Path, heads: Heads, info: HeadsInfo, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `heads.safetensors` into `folder`, made if missing. dtype: of the file, None: the heads'
    own."""
    folder, dtype = Path(folder), dtype or heads.dtype
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "schema_version": SCHEMA_VERSION,
        "heads": heads.config.to_dict(),
        "base_model": asdict(info.base_model),
        "dtype": str(dtype).removeprefix("torch."),
        "tree": info.tree,
    }
    if info.adapter:
        config["adapter"] = asdict(info.adapter)
    tensors = {
        name: tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()
        for name, tensor in heads.state_dict().items()
    }
    write_atomically(
        {
            folder / WEIGHTS_FILE: lambda path: save_file(tensors, path, metadata={"format": "pt"}),
            folder / CONFIG_FILE: lambda path: path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8"),
        }
    )


def load_heads(folder: str | Path) -> tuple[Heads, HeadsInfo]:
    """Heads on the CPU in the saved dtype, without the base's parts: `attach_base` them, after `check_base`.

    Raises ValueError for anything missing, unexpected, damaged, of another schema, or pickled.
    """
    folder = Path(folder)
    config, info, dtype = _read_config(folder)
    tensors = _read_tensors(folder)
    try:
        heads = make_heads(config, tensors.get("draft_token_ids")).to(dtype)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: {error}") from error
    _check_tensors(folder / WEIGHTS_FILE, tensors, dict(heads.state_dict()))
    heads.load_state_dict(tensors, strict=True)
    return heads, info


def check_base(info: HeadsInfo, base_fingerprint: str, base_name: str) -> None:
    """Raises ValueError where the loaded base is not the one that the heads were trained on."""
    trained_on = info.base_model
    if not (base_fingerprint == trained_on.fingerprint or is_merged(info, base_fingerprint)):
        revision = f" at revision {trained_on.revision}" if trained_on.revision else ""
        raise ValueError(
            f"heads: got base model {base_name!r} (fingerprint {base_fingerprint[:12]}), expected "
            f"{trained_on.name!r}{revision} (fingerprint {trained_on.fingerprint[:12]}), which the heads were trained "
            "on; load that one with --base, or train heads for this one"
        )


def is_merged(info: HeadsInfo, base_fingerprint: str) -> bool:
    """Whether the loaded base has the heads' adapter in its weights already."""
    adapter, plain = info.adapter, info.base_model.fingerprint
    return adapter is not None and base_fingerprint == adapter.merged_fingerprint != plain


def write_atomically(writers: dict[Path, Callable[[Path], Any]]) -> None:
    """Each writer gets a temporary path beside its file; all are on disk before the first is renamed into place.

    Raises OSError with the file and the free space where it cannot be written; what was there before is untouched.
    """
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in writers}
    try:
        for path, write in writers.items():
            try:
                write(temporary[path])
                _sync(temporary[path])
            except (OSError, SafetensorError) as error:
                free = shutil.disk_usage(path.parent).free
                raise OSError(
                    f"{path}: cannot be written ({error}; {free / 1e6:,.1f} MB are free there); what it held before is "
                    "intact; free some space and run again"
                ) from error
        for path in writers:
            os.replace(temporary[path], path)
    finally:
        for left_over in temporary.values():
            left_over.unlink(missing_ok=True)
    for parent in {path.parent for path in writers}:
        _sync(parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_config(folder: Path) -> tuple[HeadsConfig, HeadsInfo, torch.dtype]:
    path = folder / CONFIG_FILE
    content = _read_json(folder, path)
    if (version := content.get("schema_version")) != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: got schema_version {version!r}, expected {SCHEMA_VERSION}; convert with `medusa import`, or use "
            "the release that wrote it"
        )
    adapter = content.pop("adapter", None)
    _check_keys(path, "", content, {"schema_version", "heads", "base_model", "dtype", "tree"})
    if adapter is not None:
        _check_keys(path, "adapter.", adapter, {field.name for field in fields(AdapterReference)})
        for name, value in adapter.items():
            if not isinstance(value, str):
                raise ValueError(f"{path}: got adapter.{name} {value!r}, expected a string")
        adapter = AdapterReference(**adapter)
    if isinstance(content["heads"], dict):  # heads were all of one design once, and did not say which
        content["heads"] = {"design": "medusa", "markov_rank": None, "fused_layers": []} | content["heads"]
    _check_keys(path, "heads.", content["heads"], {field.name for field in fields(HeadsConfig)})
    _check_keys(path, "base_model.", content["base_model"], {field.name for field in fields(BaseReference)})
    for name in ("name", "fingerprint"):
        if not isinstance(value := content["base_model"][name], str):
            raise ValueError(f"{path}: got base_model.{name} {value!r}, expected a string")
    if not isinstance(content["dtype"], str) or content["dtype"] not in DTYPES:
        raise ValueError(f"{path}: got dtype {content['dtype']!r}, expected one of {', '.join(DTYPES)}")
    tree = content["tree"]
    if not isinstance(tree, str) or not tree or Path(tree).name != tree:
        raise ValueError(f"{path}: got tree {tree!r}, expected the name of a file in the same directory")
    try:
        config = HeadsConfig(**content["heads"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return config, HeadsInfo(BaseReference(**content["base_model"]), tree, adapter), DTYPES[content["dtype"]]


def _read_json(folder: Path, path: Path) -> dict[str, Any]:
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such directory"
        raise ValueError(f"{folder}: got {got}, expected a heads directory as `medusa train` writes it; check --heads")
    if not path.exists():
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_ENDINGS)
        got = f"pickle files ({', '.join(pickled[:3])}), which are never loaded" if pickled else f"no {CONFIG_FILE}"
        raise ValueError(f"{folder}: got {got}, expected {CONFIG_FILE} and {WEIGHTS_FILE}; see `medusa import`")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: got broken JSON ({error}), expected a heads config; copy or train it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a {type(content).__name__}, expected a JSON object")
    return content


def _check_keys(path: Path, prefix: str, content: Any, expected: set[str]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {prefix.rstrip('.')} {content!r}, expected an object with {_names(expected)}")
    if unknown := content.keys() - expected:
        raise ValueError(f"{path}: got unknown {_names(unknown, prefix)}, expected only {_names(expected, prefix)}")
    if missing := expected - content.keys():
        raise ValueError(f"{path}: got no {_names(missing, prefix)}, expected {_names(expected, prefix)}")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: got no {WEIGHTS_FILE}, expected it beside {CONFIG_FILE}; copy or train it again")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: got a file that is no complete safetensors file ({error}), expected the heads' tensors; "
            "copy or train it again"
        ) from error


def _check_tensors(path: Path, got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if missing := expected.keys() - got.keys():
        raise ValueError(f"{path}: got no tensor {_names(missing)}, expected it for the heads in {CONFIG_FILE}")
    if unexpected := got.keys() - expected.keys():
        raise ValueError(f"{path}: got tensor {_names(unexpected)}, expected none of that name for {CONFIG_FILE}")
    for name, tensor in expected.items():
        have, want = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (got[name], tensor))
        if have != want:
            raise ValueError(f"{path}: got tensor {name} as {have}, expected {want} for {CONFIG_FILE}")


def _names(names: set[str], prefix: str = "") -> str:
    shown = sorted(names)
    return ", ".join(prefix + name for name in shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
