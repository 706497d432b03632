"""The original code base's formats: v1, a whole model with heads in it, and v2, residual blocks beside a base.

Silent failures of its loaders: a directory of v1 heads alone is given 5 heads whatever it has, so v1 is written as a
whole model, whose config it follows; a head's blocks are one module there, so only one layer comes out right; of the
rope only `rope_theta` and two kinds of scaling are read, so anything else is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import HeadsConfig
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
from .json_files import read_object, write_object
from .output import save_tensors
from .tensor_files import TensorFiles

PREFIX = "medusa_head."
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window",
)  # fmt: skip


class OriginalEngine(Engine):
    """What both versions ask."""

    def check(self, config: HeadsConfig) -> None:
        super().check(config)
        if config.num_layers != 1:
            raise ValueError(
                f"{self.title}: got {config.num_layers} layers a head, expected 1: its loader gives a head one block "
                "for all of them. Instead export --to vllm, tgi, trtllm or mlc"
            )


class MedusaV1Engine(OriginalEngine):
    name = "medusa-v1"
    title = "Medusa v1"
    versions = "FasterDecoding/Medusa 1.0, Llama and Mistral (read in its source)"

    def write(self, source: Source, folder: Path) -> list[str]:
        plain = source.plain()
        content = base_config(source.base.config) | {
            "medusa_num_heads": plain.num_heads,
            "medusa_num_layers": plain.num_layers,
            "torch_dtype": str(source.dtype).removeprefix("torch."),
        }
        tensors = {name: tensor.to(source.dtype) for name, tensor in source.base.model.state_dict().items()}
        if content["tie_word_embeddings"]:
            tensors.pop("lm_head.weight", None)
        tensors |= medusa_tensors(plain, PREFIX)
        save_tensors(folder, "model", tensors, plain.metadata, source.max_shard_bytes)
        write_object(folder / CONFIG_FILE, content)
        source.base.tokenizer.save_pretrained(folder)
        _old_tokenizer(folder / "tokenizer_config.json")
        return ["the base's own weights are part of the directory"]

    def validate(self, folder: Path) -> None:
        names = ("model_type", "architectures", "medusa_num_heads", "medusa_num_layers", "hidden_size", "rope_theta")
        config = check_config(folder, needs=names, forbids=("rope_parameters",), title=self.title)
        files = TensorFiles.open(folder)
        check_tensors(files, medusa_shapes(config, PREFIX), self.title, others=True)
        embeddings = {"model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}
        output = {} if config["tie_word_embeddings"] else {"lm_head.weight": embeddings["model.embed_tokens.weight"]}
        check_tensors(files, embeddings | output, self.title, others=True)

    def serve(self, folder: str, source: Source) -> str:
        return f"python -m medusa.inference.cli --model {folder}   # in a checkout of FasterDecoding/Medusa"


class MedusaV2Engine(OriginalEngine):
    name = "medusa-v2"
    title = "Medusa v2"
    versions = "what FasterDecoding/Medusa has trained since its PR #97; read by TGI and LoRAX (read in their sources)"

    def check(self, config: HeadsConfig) -> None:
        super().check(config)
        if config.lm_head == "own" or config.draft_vocab_size is not None:
            what = "projections of their own" if config.lm_head == "own" else "a pruned vocabulary"
            raise ValueError(
                f"{self.title}: got heads with {what}, expected none: it has residual blocks only, and projects with "
                "the base's lm_head. Instead export --to tgi or medusa-v1"
            )

    def write(self, source: Source, folder: Path) -> list[str]:
        plain = source.plain()
        save_tensors(folder, MEDUSA_FILE, block_tensors(plain), plain.metadata, max_bytes=1 << 62)  # one fixed name
        write_object(folder / CONFIG_FILE, medusa_config(source, version="2"))
        return ["without an lm_head: vLLM would run these heads uninitialised, export --to vllm for it"]

    def validate(self, folder: Path) -> None:
        names = ("version", "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path")
        config = check_config(folder, needs=names, forbids=("architectures", "model_type"), title=self.title)
        if config["version"] != "2" or config["medusa_num_layers"] != 1:
            raise ValueError(f"{folder / CONFIG_FILE}: got another version or number of layers, expected '2' and 1")
        check_tensors(TensorFiles.open(folder), medusa_shapes(config, projections=False), self.title)

    def serve(self, folder: str, source: Source) -> str:
        return f"text-generation-launcher --model-id {folder} --speculate {source.config.num_heads}"


def base_config(config: Any) -> dict[str, Any]:
    """A base's config in the words of Transformers 4.34, which the original is made for. Raises ValueError for what
    that release would not see, and so compute wrong."""
    family = config.model_type
    if family not in ARCHITECTURES:
        raise ValueError(f"Medusa v1: got a base of the family {family}, expected {' or '.join(ARCHITECTURES)}")
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.pop("rope_type", "default")
    head_dim = getattr(config, "head_dim", None)
    odd = {
        f"rope of the kind {kind}": kind not in ("default", "linear", "dynamic"),
        "a head_dim of its own": head_dim not in (None, config.hidden_size // config.num_attention_heads),
        "attention biases": bool(getattr(config, "attention_bias", False)),
        "MLP biases": bool(getattr(config, "mlp_bias", False)),
        "a partial rope": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if wrong := [what for what, is_so in odd.items() if is_so]:
        raise ValueError(
            f"Medusa v1: got a base with {wrong[0]}, which its Transformers 4.34 leaves out silently. Instead export "
            "--to vllm, tgi, trtllm or mlc"
        )
    content: dict[str, Any] = {"architectures": [ARCHITECTURES[family]], "model_type": family}
    content |= {name: getattr(config, name) for name in COPIED if hasattr(config, name)}
    content["rope_theta"] = float(rope.get("rope_theta", getattr(config, "rope_theta", None) or 10_000.0))
    if kind != "default":
        content["rope_scaling"] = {"type": kind, "factor": float(rope["factor"])}
    return content


def _old_tokenizer(path: Path) -> None:
    """Transformers 5 names a class that its forerunners do not have."""
    config = read_object(path)
    if config.get("tokenizer_class") in ("TokenizersBackend", "PythonBackend"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("backend", None)
    write_object(path, config)
