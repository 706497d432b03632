"""`generate` and `stream`: the Python entrance. Prompts are chat-templated unless they are raw or token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medusa.base_model import BaseModel
from medusa.drafter import Drafter, RootDrafter
from medusa.sampling import GREEDY_SAMPLING, AcceptanceName, SamplingParams, Typical, choose_acceptance

from .engine import Engine, check_length
from .request import FinishReason, GenerationStats, Piece, Request

if TYPE_CHECKING:
    from medusa.model import MedusaModel

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass(frozen=True)
class GenerationResult:
    """An answer: its text (special tokens and stop string left out), its ids (the ending token included), why it
    ended, and how decoding went."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: GenerationStats


def encode_prompt(tokenizer: Any, prompt: Prompt, *, raw: bool = False) -> list[int]:
    """Token ids of a prompt: text (as one user turn, or as it is when `raw`), chat messages, or ids already.

    Raises ValueError where a chat template is needed and the tokenizer has none.
    """
    if isinstance(prompt, str):
        if raw:
            return list(tokenizer(prompt).input_ids)
        prompt = [{"role": "user", "content": prompt}]
    if prompt and isinstance(prompt[0], int):
        return [int(token) for token in prompt]  # type: ignore[arg-type]
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the base model's tokenizer has no chat template; pass raw=True (--raw) to send plain text")
    text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def make_requests(
    base_model: BaseModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    raw: bool = False,
    ignore_eos: bool = False,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY_SAMPLING,
    acceptance: AcceptanceName | Typical | None = None,
) -> list[Request]:
    """One request a prompt; the options are those of `generate`."""
    eos = frozenset() if ignore_eos else base_model.eos_token_ids
    tokenizer = base_model.tokenizer
    samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    if len(samplings) != len(prompts):
        raise ValueError(f"sampling: got {len(samplings)} settings for {len(prompts)} prompts, expected one each")
    requests = []
    for prompt, params in zip(prompts, samplings, strict=True):
        typical = choose_acceptance(params, acceptance)
        ids = encode_prompt(tokenizer, prompt, raw=raw)
        requests.append(Request(ids, max_new_tokens, eos, tokenizer, list(stop), params, typical))
    return requests


def run_requests(
    base_model: BaseModel,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    max_rows: int = 8,
) -> Iterator[tuple[Request, Piece]]:
    """Drive requests to their end in one engine made to measure."""
    if not requests:
        return
    capacity = max(request.capacity for request in requests)
    max_rows = min(max_rows, len(requests))
    engine = Engine(base_model, drafter, max_rows=max_rows, capacity=capacity)
    for request in requests:
        request.start_clock()
    yield from engine.run(requests)


def generate(
    model: MedusaModel,
    prompts: Sequence[Prompt] | str,
    *,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    raw: bool = False,
    ignore_eos: bool = False,
    speculate: bool = True,
    max_rows: int = 8,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY_SAMPLING,
    acceptance: AcceptanceName | Typical | None = None,
    on_piece: Callable[[int, Piece], None] | None = None,
) -> list[GenerationResult]:
    """Answer prompts as the base model would: token for token when greedy (the default), in distribution when sampling.

    sampling: for all prompts or one each; the model's own generation config is not looked at. A seed holds for every
    prompt that it is given to. acceptance: "greedy", "rejection" (lossless, the default) or "typical" / `Typical(...)`,
    which is LOSSY: faster, with answers that the base would not give.
    speculate: False decodes with the same engine and a root-only tree. max_rows: sequences decoded together.
    on_piece: called with the prompt's index and each piece as it comes.
    Raises ValueError for a prompt that does not fit the context with `max_new_tokens`, before anything is computed.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    requests = make_requests(
        model.base,
        prompts,
        max_new_tokens=max_new_tokens,
        stop=stop,
        raw=raw,
        ignore_eos=ignore_eos,
        sampling=sampling,
        acceptance=acceptance,
    )
    drafter = model.drafter() if speculate else RootDrafter()
    index = {id(request): i for i, request in enumerate(requests)}
    for request, piece in run_requests(model.base, drafter, requests, max_rows=max_rows):
        if on_piece:
            on_piece(index[id(request)], piece)
    return [_result(request) for request in requests]


def stream(model: MedusaModel, prompt: Prompt, *, speculate: bool = True, **options: Any) -> Iterator[Piece]:
    """The answer to one prompt, piece by piece; `options` as for `generate`. The texts joined are its text."""
    return stream_request(model, prompt, speculate=speculate, **options)[1]


def stream_request(
    model: MedusaModel, prompt: Prompt, *, speculate: bool = True, **options: Any
) -> tuple[Request, Iterator[Piece]]:
    """Like `stream`, with the request whose statistics grow as its pieces are taken. A prompt that does not fit is
    refused here, not at the first piece."""
    [request] = make_requests(model.base, [prompt], **options)
    check_length(model.base, request)
    drafter = model.drafter() if speculate else RootDrafter()
    return request, (piece for _, piece in run_requests(model.base, drafter, [request]))


def check_prompt(base_model: BaseModel, prompt_ids: list[int], max_new_tokens: int) -> None:
    """Raises ValueError where prompt and answer pass the context length."""
    check_length(base_model, Request(prompt_ids, max_new_tokens, frozenset(), base_model.tokenizer))


def _result(request: Request) -> GenerationResult:
    assert request.finish_reason is not None
    return GenerationResult(request.text, request.token_ids, request.finish_reason, request.stats)
