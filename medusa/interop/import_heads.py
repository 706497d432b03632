"""`medusa import`: heads from any engine's files, or a whole model with heads in it, into a directory of ours."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..adapter import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from ..base_model import BaseModel, load_base_model
from ..calibration import Calibration
from ..checkpoint import BaseReference, HeadsInfo, check_base, load_heads, save_heads
from ..config import HeadsConfig
from ..fingerprint import fingerprint
from .json_files import read_object
from .output import new_folder
from .plain import to_heads
from .read_heads import read_heads
from .tensor_files import TensorFiles, member

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Import:
    """folder: what was written. notes: what differed from what the source says of itself."""

    folder: Path
    config: HeadsConfig
    dtype: torch.dtype
    notes: list[str]


def import_heads(source: str | Path, out: str | Path, base: str, *, trust_remote_code: bool = False) -> Import:
    """Write the heads in the directory `source` to `out`, new or empty.

    base: the model that they were trained on; for a whole model with heads in it, that directory itself. Raises
    ValueError for whatever is damaged, unsafe or does not fit; `out` is untouched then.
    """
    source, out = Path(source), Path(out)
    config = read_config(source)
    if "schema_version" in config:
        return _copy_ours(source, out, base, trust_remote_code)
    files = TensorFiles.open(source)
    read = read_heads(files, config, source / CONFIG_FILE)
    is_half = read.plain.dtype == torch.bfloat16
    base_model = _load(base, torch.bfloat16 if is_half else torch.float32, trust_remote_code)
    check_whole_model(files, read.whole_model, base_model)
    heads, notes = to_heads(read.plain, base_model.lm_head_weight, draft_token_ids=read.draft_token_ids)
    info = HeadsInfo(BaseReference(base, fingerprint(base_model.model)))
    with new_folder(out) as unfinished:
        save_heads(unfinished, heads, info)
        load_heads(unfinished)
    return Import(out, heads.config, heads.dtype, read.notes + notes)


def read_config(folder: Path) -> dict[str, Any]:
    """Of a directory of heads. Raises ValueError where there is none, or it is none."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such directory"
        raise ValueError(f"{folder}: got {got}, expected a directory with {CONFIG_FILE} and tensors; check --from")
    return read_object(member(folder, CONFIG_FILE))


def check_whole_model(files: TensorFiles, names: list[str], base: BaseModel) -> None:
    """Heads of a whole model belong to that model. Raises ValueError where `base` is another: told by the first row of
    every tensor that both have."""
    parameters = base.model.state_dict()
    common = [name for name in names if name in parameters]
    if names and not common:
        raise ValueError(f"{files.folder}: got a model with other tensors ({names[0]}) than the base {base.name!r} has")
    for name in common:
        theirs, ours = files.view(name), parameters[name]
        if theirs.shape != ours.shape or not torch.equal(theirs[:1].to(ours.dtype), ours[:1]):
            raise ValueError(
                f"{files.folder}: got a model with heads whose own {name} is not that of the base {base.name!r}, "
                f"expected the model that the heads were trained in; give --base {files.folder}"
            )


def _copy_ours(source: Path, out: Path, base: str, trust_remote_code: bool) -> Import:
    for path in source.iterdir():
        if path.is_file() or path.is_symlink():
            member(source, path.name)
    TensorFiles.open(source)
    heads, info = load_heads(source)
    for name, tensor in heads.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{source}: got NaN or infinity in tensor {name}, expected numbers; download it again")
    base_model = _load(base, torch.bfloat16 if heads.dtype == torch.bfloat16 else torch.float32, trust_remote_code)
    check_base(info, fingerprint(base_model.model), base_model.name)
    calibration = Calibration.load(source / info.tree) if (source / info.tree).exists() else None
    with new_folder(out) as unfinished:
        reference = BaseReference(base, info.base_model.fingerprint)
        save_heads(unfinished, heads, HeadsInfo(reference, info.tree, info.adapter))
        if calibration:
            calibration.save(unfinished / info.tree)
        if info.adapter:
            (unfinished / ADAPTER_FOLDER).mkdir()
            for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
                shutil.copyfile(member(source / ADAPTER_FOLDER, name), unfinished / ADAPTER_FOLDER / name)
    return Import(out, heads.config, heads.dtype, [])


def _load(base: str, dtype: torch.dtype, trust_remote_code: bool) -> BaseModel:
    return load_base_model(base, dtype=dtype, trust_remote_code=trust_remote_code)
