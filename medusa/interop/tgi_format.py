"""Text Generation Inference: `--model-id` is the heads directory, which names its base.

Its silent failures: a key `architectures` makes it leave the heads out; it always loads the base's revision "main".
Projections of their own are its "V1" layout; without any it falls back to "V2", one layer only, on the base's lm_head.
"""

from __future__ import annotations

from pathlib import Path

from .engine import (
    CONFIG_FILE,
    MEDUSA_FILE,
    Engine,
    Source,
    block_tensors,
    check_config,
    check_tensors,
    medusa_config,
    medusa_shapes,
    medusa_tensors,
)
from .json_files import write_object
from .output import save_tensors
from .tensor_files import TensorFiles


class TgiEngine(Engine):
    name = "tgi"
    title = "TGI"
    versions = "Text Generation Inference 2.x and 3.x (read in the source of January 2026)"

    def write(self, source: Source, folder: Path) -> list[str]:
        config = source.config
        if source.info.base_model.revision not in (None, "main") and not Path(source.base_name).is_dir():
            raise ValueError(
                f"TGI: got heads for the base's revision {source.info.base_model.revision!r}, expected main, the only "
                "one it loads; give a local copy of that revision with --base DIR"
            )
        is_bare = config.lm_head == "shared" and config.draft_vocab_size is None and config.num_layers == 1
        plain = source.plain()
        tensors = block_tensors(plain) if is_bare else medusa_tensors(plain)
        save_tensors(folder, MEDUSA_FILE, tensors, plain.metadata, max_bytes=1 << 62)  # the name is fixed
        write_object(folder / CONFIG_FILE, medusa_config(source))
        return []

    def validate(self, folder: Path) -> None:
        names = ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path")
        config = check_config(folder, needs=names, forbids=("architectures", "model_type"), title=self.title)
        if not (folder / f"{MEDUSA_FILE}.safetensors").is_file():
            raise ValueError(f"{folder}: got no {MEDUSA_FILE}.safetensors, the only name that TGI looks for")
        files = TensorFiles.open(folder)
        layers = config["medusa_num_layers"]
        own = f"0.{layers}.weight" in files
        if not own and layers != 1:
            raise ValueError(f"{folder}: got {layers} layers without projections, expected 1 layer, or projections")
        check_tensors(files, medusa_shapes(config, projections=own), self.title)

    def serve(self, folder: str, source: Source) -> str:
        return f"text-generation-launcher --model-id {folder} --speculate {source.config.num_heads}"
