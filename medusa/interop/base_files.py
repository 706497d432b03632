"""What heads need of their base, out of its files: for engines whose own copy is split over devices or fused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from torch import Tensor

from ..fingerprint import CONFIG_FIELDS, sample_digest
from .tensor_files import TensorFiles

OUTPUTS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")


def base_folder(name_or_folder: str, revision: str | None = None) -> Path:
    """The directory, or that of a Hub repository, from its cache where it lies there."""
    if Path(name_or_folder).is_dir():
        return Path(name_or_folder)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name_or_folder, revision=revision, allow_patterns=["*.json", "*.safetensors"]))


def read_ends(folder: Path) -> tuple[Tensor, Tensor]:
    """lm_head and input embeddings, both [V, D]; one tensor where they are tied. Raises ValueError for a family whose
    names are not known here."""
    files = TensorFiles.open(folder)
    inputs = [name for name in files if name.endswith(EMBEDDINGS)]
    if len(inputs) != 1:
        raise ValueError(f"{folder}: got {inputs or 'no tensor'} for input embeddings, expected one of {EMBEDDINGS}")
    embeddings = files.floats(inputs[0])
    output = next((name for name in OUTPUTS if name in files), None)
    return (files.floats(output) if output else embeddings), embeddings


def files_fingerprint(folder: Path) -> str:
    """`medusa.fingerprint.fingerprint` of the model in `folder`, where its files hold its parameters as they are, as
    those of dense models do; quantized or fused ones give another."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder))
    files = TensorFiles.open(folder)
    shapes = {name: getattr(config, name, None) for name in CONFIG_FIELDS}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode())
    for part in sorted(sample_digest(files.view(name)) for name in files):
        digest.update(part)
    return digest.hexdigest()
