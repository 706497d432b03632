"""Behind Transformers' `model.generate(..., custom_generate=DIR, trust_remote_code=True)`: our decoding, its words.

`custom_generate/generate.py` of an exported directory calls `generate_with_heads`, with what `generate` was given. The
caller's model is left as it was: its attention, mode and gradients are put back. What our decoding has no notion of
(beams, stopping criteria of one's own) is refused, not ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.base_model import BaseModel, adapt_base_model
from medusa.calibration import Calibration
from medusa.checkpoint import WEIGHTS_FILE, HeadsInfo, check_base, is_merged, load_heads
from medusa.drafting import make_drafter
from medusa.fingerprint import fingerprint
from medusa.heads import Heads
from medusa.hub import find_heads
from medusa.sampling import SamplingParams
from medusa.tree import DraftTree

from .engine import check_length
from .generation import run_requests
from .request import Request

# `generate`'s arguments and settings that would change the tokens, and that we have no equivalent for.
REFUSED_ARGUMENTS = (
    "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "negative_prompt_ids",
    "negative_prompt_attention_mask", "inputs_embeds", "cache", "past_key_values",
)  # fmt: skip
REFUSED_SETTINGS = {
    "num_beams": (None, 1), "penalty_alpha": (None, 0), "no_repeat_ngram_size": (None, 0), "typical_p": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0), "bad_words_ids": (None,), "force_words_ids": (None,),
    "min_length": (None, 0), "min_new_tokens": (None, 0), "sequence_bias": (None,), "guidance_scale": (None, 1),
    "suppress_tokens": (None,), "begin_suppress_tokens": (None,), "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,), "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0), "max_time": (None,),
    "output_scores": (None, False), "output_logits": (None, False), "output_attentions": (None, False),
    "output_hidden_states": (None, False), "exponential_decay_length_penalty": (None,), "watermarking_config": (None,),
    "top_h": (None,), "prompt_lookup_num_tokens": (None,),
}  # fmt: skip


def generate_with_heads(
    model: Any,
    heads: str | Path,
    *,
    inputs: Tensor | None = None,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    streamer: Any = None,
    logits_processor: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    **arguments: Any,
) -> Any:
    """int64 [B x num_return_sequences, T]: prompts and answers, padded on the right, as `model.generate` returns them,
    or its output object with `return_dict_in_generate`.

    heads: a heads directory or Hub repository (`revision`, `token`: its). inputs or input_ids: int64 [B, T], padding
    marked by attention_mask. Sampling draws from torch's global generator, so that `torch.manual_seed` holds.
    Raises ValueError for heads of another base, and for arguments that this decoding has no equivalent for.
    """
    _refuse(arguments, REFUSED_ARGUMENTS)
    arguments.pop("synced_gpus", None)
    prompts = inputs if inputs is not None else input_ids
    if prompts is None:
        raise ValueError("custom_generate: got neither inputs nor input_ids, expected int64 [B, T]")
    config, unused = model._prepare_generation_config(copy.deepcopy(generation_config), **arguments)
    if left := [name for name, value in unused.items() if value is not None and name not in ("use_cache",)]:
        raise ValueError(
            f"custom_generate: got {left[0]}, which decoding with heads has no equivalent for; leave it out"
        )
    _check_settings(config)
    limit = _limit(model, generation_config, arguments, config, prompts.shape[1])
    folder = find_heads(heads, revision=revision, token=token)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"custom_generate: got no {WEIGHTS_FILE} in {folder}, expected heads there; pass heads=DIR")
    rows = _rows(prompts, attention_mask, config.num_return_sequences or 1)
    with borrowed(model, tokenizer) as base:
        requests = [_request(base, row, limit, config, tokenizer, logits_processor) for row in rows]
        _run(base, folder, requests, streamer)
    answers = [request.token_ids for request in requests]
    sequences = _joined(prompts, answers, config)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


@contextmanager
def borrowed(model: Any, tokenizer: Any) -> Iterator[BaseModel]:
    """`model` as our decoding wants it, and afterwards as it was."""
    attention, training = model.config._attn_implementation, model.training
    with_grad = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield adapt_base_model(model, tokenizer, name=getattr(model, "name_or_path", "") or type(model).__name__)
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
        for parameter in with_grad:
            parameter.requires_grad_(True)


def _run(base: BaseModel, folder: Path, requests: list[Request], streamer: Any) -> None:
    heads, info, calibration = _load(folder.resolve(), (folder / WEIGHTS_FILE).stat().st_mtime_ns)
    base.fuse_layers(heads.config.fused_layers)
    base_fingerprint = fingerprint(base.model)
    check_base(info, base_fingerprint, base.name)
    if info.adapter and not is_merged(info, base_fingerprint):
        raise ValueError(f"custom_generate: {folder} needs its adapter in the model; load the merged model instead")
    if streamer is not None and len(requests) > 1:
        raise ValueError(f"custom_generate: got a streamer and {len(requests)} sequences, expected one")
    heads = copy.deepcopy(heads).to(device=base.device, dtype=base.dtype).requires_grad_(False).eval()
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    tree = calibration.tree if calibration else DraftTree.chain(heads.config.num_heads)
    for request in requests:
        check_length(base, request)
    if streamer is not None:
        streamer.put(torch.tensor([requests[0].prompt_ids]))
    for _, piece in run_requests(base, make_drafter(heads, tree, calibration), requests):
        for token in piece.token_ids if streamer is not None else ():
            streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()


@lru_cache(maxsize=2)  # `generate` is called again and again; a changed file has another time
def _load(folder: Path, _changed: int) -> tuple[Heads, HeadsInfo, Calibration | None]:
    heads, info = load_heads(folder)
    path = folder / info.tree
    return heads, info, Calibration.load(path) if path.exists() else None


def _limit(model: Any, given: Any, arguments: dict[str, Any], config: Any, prompt_length: int) -> int:
    """New tokens; 20 where nobody said, as Transformers has it."""
    if config.max_new_tokens:
        return int(config.max_new_tokens)
    said = [arguments.get("max_length"), getattr(given, "max_length", None), model.generation_config.max_length]
    length = next((number for number in said if number is not None), None)
    return 20 if length is None else int(length) - prompt_length


def _request(
    base: BaseModel, prompt: list[int], limit: int, config: Any, tokenizer: Any, logits_processor: Any
) -> Request:
    stop = config.stop_strings or []
    if stop and tokenizer is None:
        raise ValueError("custom_generate: got stop_strings without a tokenizer, expected tokenizer=... with them")
    eos = config.eos_token_id if config.eos_token_id is not None else []
    ids = frozenset(eos if isinstance(eos, list | tuple) else [eos])
    stop = [stop] if isinstance(stop, str) else list(stop)
    return Request(prompt, limit, ids, tokenizer or _NoText(), stop, _sampling(config, logits_processor))


def _sampling(config: Any, logits_processor: Any) -> SamplingParams:
    penalty, processors = config.repetition_penalty or 1.0, tuple(logits_processor or ())
    if not config.do_sample:
        return SamplingParams(0.0, repetition_penalty=penalty, processors=processors)
    return SamplingParams(
        1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
        seed=int(torch.randint(1 << 62, ())),
        processors=processors,
    )


class _NoText:
    """In place of a tokenizer where only ids are wanted."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


def _rows(prompts: Tensor, attention_mask: Tensor | None, copies: int) -> list[list[int]]:
    """Token ids without padding."""
    if prompts.dim() != 2:
        raise ValueError(f"custom_generate: got inputs of shape {list(prompts.shape)}, expected [B, T]")
    mask = torch.ones_like(prompts) if attention_mask is None else attention_mask
    if mask.shape != prompts.shape:
        raise ValueError(f"custom_generate: got attention_mask {list(mask.shape)}, expected {list(prompts.shape)}")
    kept = [row[seen.bool()].tolist() for row, seen in zip(prompts, mask, strict=True)]
    return [row for row in kept for _ in range(copies)]


def _joined(prompts: Tensor, answers: list[list[int]], config: Any) -> Tensor:
    copies = len(answers) // len(prompts)
    eos = config.eos_token_id if isinstance(config.eos_token_id, int) else (config.eos_token_id or [0])[0]
    pad = config.pad_token_id if config.pad_token_id is not None else eos
    length = max(len(answer) for answer in answers)
    padded = [answer + [pad] * (length - len(answer)) for answer in answers]
    tail = torch.tensor(padded, dtype=prompts.dtype, device=prompts.device)
    return torch.cat([prompts.repeat_interleave(copies, dim=0), tail], dim=1)


def _refuse(arguments: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        value = arguments.pop(name, None)
        if value is not None and not (isinstance(value, list) and not value):
            raise ValueError(
                f"custom_generate: got {name}, which decoding with heads has no equivalent for; leave it out, or call "
                "generate without custom_generate"
            )


def _check_settings(config: Any) -> None:
    for name, off in REFUSED_SETTINGS.items():
        value = getattr(config, name, None)
        if value not in off and value != []:
            raise ValueError(
                f"custom_generate: got {name}={value!r}, which decoding with heads has no equivalent for; leave it "
                "out, or call generate without custom_generate"
            )
