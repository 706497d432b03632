"""Tiny random models of many families and a byte tokenizer, so that tests need no download and run in milliseconds.

Weights are drawn wider than usual, else every greedy continuation of a random model is one repeated token.
"""

from __future__ import annotations

from typing import Any

import torch

VOCAB_SIZE = 128
WINDOW = 8

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}

# What a family has beyond COMMON: class name, and the settings that make it worth a test of its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"logits_scaling": 2.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
}
SLIDING_FAMILIES = ("mistral", "gemma2", "gemma3")


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """Transformers config of `family` at toy size; `overrides` replace any field."""
    import transformers

    name, extra = FAMILIES[family]
    config_name = f"{name.removesuffix('Text')}TextConfig" if name.endswith("Text") else f"{name}Config"
    return getattr(transformers, config_name)(**{**COMMON, **extra, **overrides})


def tiny_model(family: str = "llama", *, seed: int = 0, std: float = 0.3, **overrides: Any) -> Any:
    """Random float32 causal LM of `family` in eval mode, the same for the same arguments; global RNG left alone.

    `std`: every weight matrix is drawn from N(0, std^2); norms keep their ones. No token id ends generation unless
    `eos_token_id` is overridden in the generation config.
    """
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Printable ASCII, a token a character; 100 ids, inside VOCAB_SIZE.

    0 pad, 1 <|im_start|>, 2 <|im_end|> (ends a turn), 3 any other character, 4 newline, then " " to "~" from 5.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
    letters = ["\n", *(chr(code) for code in range(32, 127))]
    vocab = {token: i for i, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def save_tiny_base(folder: Any, family: str = "llama", **overrides: Any) -> Any:
    """Model and tokenizer as a directory that `--base` takes; returns the folder."""
    tiny_model(family, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class SlowTokenizer:
    """A tokenizer without character offsets. Here, so that another process finds it."""

    def __len__(self) -> int:
        return 100
