"""TensorRT-LLM: the only engine here that verifies a tree, `medusa_choices`, which is fixed when the engine is built.

The tree is the calibrated one, or there is no export: its default is made for other heads. Projections and biases are
mandatory; nothing is shared.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..tree import DraftTree
from .engine import (
    CONFIG_FILE,
    MEDUSA_FILE,
    Engine,
    Source,
    check_config,
    check_tensors,
    medusa_config,
    medusa_shapes,
    medusa_tensors,
)
from .json_files import write_object
from .output import save_tensors
from .tensor_files import TensorFiles

CHOICES_FILE = "medusa_choices.json"
MAX_DRAFT_LEN = 63
FAMILIES = ("llama", "mistral", "mixtral", "qwen2")


class TrtllmEngine(Engine):
    name = "trtllm"
    title = "TensorRT-LLM"
    versions = (
        "TensorRT-LLM up to 1.2, in releases that read safetensors heads (read in its source; removed in July 2026)"
    )

    def write(self, source: Source, folder: Path) -> list[str]:
        if (family := source.base.config.model_type) not in FAMILIES:
            raise ValueError(f"{self.title}: got a base of the family {family}, expected one of {', '.join(FAMILIES)}")
        tree = self._tree(source)
        plain = source.plain(width=tree.max_width)
        save_tensors(folder, MEDUSA_FILE, medusa_tensors(plain), plain.metadata, max_bytes=1 << 62)  # one fixed name
        write_object(folder / CONFIG_FILE, medusa_config(source))
        (folder / CHOICES_FILE).write_text(json.dumps(tree.to_list()) + "\n", encoding="utf-8")
        return [f"{CHOICES_FILE}: the calibrated tree of {tree.num_nodes - 1} drafted tokens; pass it when building"]

    def _tree(self, source: Source) -> DraftTree:
        if source.calibration is None:
            raise ValueError(
                f"{self.title}: got heads without {source.info.tree}, whose tree it needs; run `medusa calibrate`"
            )
        tree = source.calibration.tree
        if not 1 <= tree.num_nodes - 1 <= MAX_DRAFT_LEN:
            raise ValueError(
                f"{self.title}: got a tree of {tree.num_nodes - 1} drafted tokens, expected 1 to {MAX_DRAFT_LEN}; run "
                "`medusa calibrate` on the machine and with the heads that are to be served"
            )
        return DraftTree.from_paths(tree.node_paths, max_depth=source.config.num_heads)

    def validate(self, folder: Path) -> None:
        names = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
        config = check_config(folder, needs=names, title=self.title)
        check_tensors(TensorFiles.open(folder), medusa_shapes(config), self.title)
        path = folder / CHOICES_FILE
        try:
            tree = DraftTree.from_paths(json.loads(path.read_text()), max_depth=config["medusa_num_heads"])
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{path}: got choices that make no tree for these heads ({error})") from error
        if not 1 <= tree.num_nodes - 1 <= MAX_DRAFT_LEN:
            raise ValueError(f"{path}: got {tree.num_nodes - 1} paths, expected 1 to {MAX_DRAFT_LEN}")

    def serve(self, folder: str, source: Source) -> str:
        config = source.config
        kind = {"qwen2": "qwen2", "mixtral": "mixtral"}.get(source.base.config.model_type, "llama")
        return (
            f"python examples/medusa/convert_checkpoint.py --model_type {kind} --model_dir {source.base_name} \\\n"
            f"    --medusa_model_dir {folder} --output_dir checkpoint --dtype float16 \\\n"
            f"    --num_medusa_heads {config.num_heads} --num_medusa_layers {config.num_layers} "
            f"--max_medusa_token_len {MAX_DRAFT_LEN}\n"
            "trtllm-build --checkpoint_dir checkpoint --output_dir engine --speculative_decoding_mode medusa\n"
            "python examples/run.py --engine_dir engine --temperature 0 \\\n"
            f'    --tokenizer_dir {source.base_name} --medusa_choices "$(cat {folder}/{CHOICES_FILE})" --input_text ...'
        )
