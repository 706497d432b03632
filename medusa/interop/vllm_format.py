"""vLLM's built-in Medusa (`method: "medusa"`): chains of first guesses.

Its silent failures: biases are dropped unless `medusa_fc_bias` is true; heads without an lm_head run uninitialised; any
key with "num" and "heads" (or "layers") in it overwrites the number of heads; a `token_map` fails or mis-sizes. So:
new-style names, the flag, an lm_head always, exactly one key of either kind, never a token_map.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from .engine import CONFIG_FILE, Engine, Source, check_config, check_tensors
from .json_files import write_object
from .output import save_tensors
from .tensor_files import TensorFiles


class VllmEngine(Engine):
    name = "vllm"
    title = "vLLM's medusa method"
    versions = (
        "vLLM 0.18 to 0.32 (0.32.0 was run, the others read; 0.33 dropped the method: use the custom class there)"
    )

    def write(self, source: Source, folder: Path) -> list[str]:
        plain, config = source.plain(), source.config
        tensors: dict[str, torch.Tensor] = {}
        for k, head in enumerate(plain.blocks):
            for j, (weight, bias) in enumerate(head):
                tensors |= {f"blocks.{k}.layers.{j}.weight": weight, f"blocks.{k}.layers.{j}.bias": bias}
        tensors |= {f"lm_heads.{k}.weight": weight for k, weight in enumerate(plain.projections)}
        save_tensors(folder, "model", tensors, plain.metadata, source.max_shard_bytes)
        content = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.vocab_size,
            "medusa_fc_bias": True,
            "original_lm_head": config.lm_head == "shared",
            "base_model_name_or_path": source.base_name,
            "torch_dtype": str(source.dtype).removeprefix("torch."),
        }
        write_object(folder / CONFIG_FILE, content)
        return []

    def validate(self, folder: Path) -> None:
        sizes = ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size", "truncated_vocab_size")
        config = check_config(folder, needs=(*sizes, "model_type"), title=self.title)
        path = folder / CONFIG_FILE
        for part, wanted in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            if names := [name for name in config if "num" in name and part in name and name != wanted]:
                raise ValueError(f"{path}: got {names[0]}, with which vLLM overwrites {wanted}; leave it out")
        if config["model_type"] != "medusa" or config.get("architectures", ["MedusaModel"]) != ["MedusaModel"]:
            raise ValueError(f"{path}: got another model_type or architecture, expected medusa and MedusaModel")
        if config["truncated_vocab_size"] != config["vocab_size"]:
            raise ValueError(f"{path}: got a truncated_vocab_size, for which vLLM sizes nothing; expected vocab_size")
        files = TensorFiles.open(folder)
        if "token_map" in files:
            raise ValueError(f"{folder}: got a token_map, which vLLM does not load; widen the projections instead")
        if config.get("medusa_fc_bias") is not True:
            raise ValueError(f"{path}: got no medusa_fc_bias, without which vLLM drops all biases; expected true")
        size, vocab = config["hidden_size"], config["vocab_size"]
        shapes: dict[str, tuple[int, ...]] = {}
        for k in range(config["num_heads"]):
            for j in range(config["num_hidden_layers"]):
                shapes |= {f"blocks.{k}.layers.{j}.weight": (size, size), f"blocks.{k}.layers.{j}.bias": (size,)}
        num_projections = 1 if config.get("original_lm_head") else config["num_heads"]
        shapes |= {f"lm_heads.{k}.weight": (vocab, size) for k in range(num_projections)}
        check_tensors(files, shapes, self.title)

    def serve(self, folder: str, source: Source) -> str:
        options = {"method": "medusa", "model": folder, "num_speculative_tokens": source.config.num_heads}
        return f"vllm serve {source.base_name} --speculative-config '{json.dumps(options)}'"
