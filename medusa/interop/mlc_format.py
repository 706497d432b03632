"""MLC-LLM: a model of its own, compiled like any other, whose config must say hidden and vocabulary size."""

from __future__ import annotations

from pathlib import Path

from .engine import (
    CONFIG_FILE,
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

PREFIX = "medusa_head."


class MlcEngine(Engine):
    name = "mlc"
    title = "MLC-LLM"
    versions = "MLC-LLM since June 2024, speculative mode medusa (read in its source)"

    def write(self, source: Source, folder: Path) -> list[str]:
        plain = source.plain()
        save_tensors(folder, "model", medusa_tensors(plain, PREFIX), plain.metadata, source.max_shard_bytes)
        write_object(folder / CONFIG_FILE, medusa_config(source, model_type="medusa"))
        return []

    def validate(self, folder: Path) -> None:
        names = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
        config = check_config(folder, needs=names, title=self.title)
        check_tensors(TensorFiles.open(folder), medusa_shapes(config, PREFIX), self.title)

    def serve(self, folder: str, source: Source) -> str:
        return (
            f"mlc_llm convert_weight {folder} --model-type medusa --quantization q0f16 -o heads-mlc\n"
            f"mlc_llm gen_config {folder} --model-type medusa --quantization q0f16 --conv-template LM -o heads-mlc\n"
            f"# BASE-MLC: {source.base_name}, converted\n"
            "mlc_llm serve BASE-MLC --speculative-mode medusa --additional-models heads-mlc"
        )
