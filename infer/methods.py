"""Ways of decoding one prompt, all measured alike: stock Transformers, its prompt lookup, our engine with and without
heads. The benchmark and the side-by-side answer of `medusa generate --compare` run these."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from medusa.adapter import MergedAdapter
from medusa.base_model import BaseModel
from medusa.draft import Draft
from medusa.drafter import Drafter, RootDrafter
from medusa.model import MedusaModel
from medusa.sampling import GREEDY_SAMPLING, SamplingParams

from .generation import run_requests
from .request import Request

LOOKUP_TOKENS = 10  # Transformers' own suggestion for prompt_lookup_num_tokens


@dataclass(frozen=True)
class Sample:
    """One prompt decoded once. seconds: prefill to last token. num_steps: forwards after the prefill. num_drafted:
    tokens that these verified besides their roots; propose_seconds: of `seconds`, what drafting took; 0 where it is not
    known."""

    token_ids: list[int]
    seconds: float
    time_to_first_token_s: float
    num_steps: int
    num_drafted: int = 0
    propose_seconds: float = 0.0


# (prompt_ids, max_new_tokens) -> Sample
Method = Callable[[list[int], int], Sample]

METHODS = {
    "hf": "stock transformers generate",
    "hf-lookup": "stock generate with its own prompt lookup",
    "ar": "this engine, nothing drafted",
    "medusa": "this engine, drafting as is the heads' default",
    "medusa-static": "this engine, the saved tree of the heads' guesses",
    "medusa-static-lookup": "this engine, the saved tree and n-gram matches",
    "medusa-dynamic": "this engine, a tree grown anew in each step",
    "lookup": "this engine, drafting n-gram matches, without heads",
}


def make_methods(
    model: MedusaModel, stock: StockModel, sampling: SamplingParams = GREEDY_SAMPLING
) -> dict[str, Method]:
    """Every way of running `model`, by the names of `METHODS`. Where `sampling` draws, each prompt has a seed of its
    own, the same for all methods."""
    return {
        "hf": stock.method(sampling),
        "hf-lookup": stock.method(sampling, prompt_lookup_num_tokens=LOOKUP_TOKENS),
        "ar": engine_method(model.base, RootDrafter, sampling),
        "medusa": engine_method(model.base, model.drafter, sampling),
        "medusa-static": engine_method(model.base, lambda: model.drafter(tree="static", lookup=False), sampling),
        "medusa-static-lookup": engine_method(model.base, lambda: model.drafter(tree="static", lookup=True), sampling),
        "medusa-dynamic": engine_method(model.base, lambda: model.drafter(tree="dynamic", lookup=False), sampling),
        "lookup": engine_method(model.base, lambda: model.drafter(tree="none", lookup=True), sampling),
    }


def for_prompt(sampling: SamplingParams, prompt_ids: list[int]) -> SamplingParams:
    """The same settings with a seed that only this prompt has."""
    return replace(sampling, seed=(sampling.seed or 0) + zlib.crc32(repr(prompt_ids).encode()))


def engine_method(
    base_model: BaseModel, make_drafter: Callable[[], Drafter], sampling: SamplingParams = GREEDY_SAMPLING
) -> Method:
    def run(prompt_ids: list[int], max_new_tokens: int) -> Sample:
        params = for_prompt(sampling, prompt_ids)
        request = Request(prompt_ids, max_new_tokens, base_model.eos_token_ids, base_model.tokenizer, sampling=params)
        drafter = TimedDrafter(make_drafter())
        start = time.perf_counter()
        for _ in run_requests(base_model, drafter, [request]):
            pass
        seconds, stats = time.perf_counter() - start, request.stats
        first, spent = stats.time_to_first_token_s, drafter.seconds
        return Sample(request.token_ids, seconds, first, stats.num_steps, stats.num_drafted, spent)

    return run


class TimedDrafter(Drafter):
    """Another drafter, and the seconds that it took for proposing and for following the rows' text."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.max_nodes, self.seconds = inner, inner.max_nodes, 0.0

    def propose(self, root: Tensor, hidden: Tensor) -> Draft:
        start = time.perf_counter()
        draft = self.inner.propose(root, hidden)
        if root.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        return draft

    def observe(self, rows: slice, tokens: Tensor, counts: Tensor, hidden: Tensor | None) -> None:
        start = time.perf_counter()
        self.inner.observe(rows, tokens, counts, hidden)
        self.seconds += time.perf_counter() - start

    def clear_row(self, row: int) -> None:
        self.inner.clear_row(row)

    def move_row(self, source: int, target: int) -> None:
        self.inner.move_row(source, target)


class _Clock(BaseStreamer):
    """When tokens came. Transformers hands a streamer the prompt, then the new tokens of each forward."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class StockModel:
    """The base model loaded once more, untouched by our packing; its own generation config is not looked at."""

    model: Any
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls, base: BaseModel, adapter: MergedAdapter | None = None, *, trust_remote_code: bool = False
    ) -> StockModel:
        loaded = AutoModelForCausalLM.from_pretrained(
            base.name, revision=base.revision, dtype=base.dtype, trust_remote_code=trust_remote_code
        )
        if adapter:
            adapter.merge_into(loaded)
        eos = sorted(base.eos_token_ids) or None
        settings = {"eos_token_id": eos, "pad_token_id": eos[0] if eos else 0}
        # Unset values are filled from the model's own generation config: a repetition penalty would change the answer.
        loaded.generation_config = GenerationConfig(**settings)
        return cls(loaded.to(base.device).eval(), settings)

    def method(self, sampling: SamplingParams = GREEDY_SAMPLING, **extra: Any) -> Method:
        """Raises ValueError for a setting that stock generation does not have."""
        chosen = stock_sampling(sampling)

        def run(prompt_ids: list[int], max_new_tokens: int) -> Sample:
            ids = torch.tensor([prompt_ids], device=self.model.device)
            config = GenerationConfig(**self.settings, **chosen, max_new_tokens=max_new_tokens, **extra)
            torch.manual_seed(for_prompt(sampling, prompt_ids).seed or 0)
            clock, mask, start = _Clock(), torch.ones_like(ids), time.perf_counter()
            output = self.model.generate(ids, attention_mask=mask, generation_config=config, streamer=clock)
            end = time.perf_counter()
            _, first, *later = clock.times
            return Sample(output[0, len(prompt_ids) :].tolist(), end - start, first - start, len(later))

        return run

    @torch.inference_mode()
    def next_logits(self, token_ids: list[int]) -> Tensor:
        """float32 [1, V]: those after `token_ids`."""
        ids = torch.tensor([token_ids], device=self.model.device)
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()

    def top_two_gap(self, token_ids: list[int]) -> float:
        """Difference of the two highest logits after `token_ids`."""
        best, second = self.next_logits(token_ids)[0].topk(2).values.tolist()
        return float(best - second)


def stock_sampling(params: SamplingParams) -> dict[str, Any]:
    """The same settings as Transformers' GenerationConfig names them."""
    if params.presence_penalty or params.frequency_penalty or params.processors:
        raise ValueError(
            "stock generate: got presence_penalty, frequency_penalty or processors, which it does not have; leave them "
            "out to compare with it"
        )
    settings: dict[str, Any] = {"do_sample": params.temperature > 0}
    if params.repetition_penalty != 1:
        settings["repetition_penalty"] = float(params.repetition_penalty)
    if params.temperature > 0:
        settings |= {"temperature": float(params.temperature), "top_k": int(params.top_k), "top_p": params.top_p}
        settings["min_p"] = params.min_p or None
    return settings
