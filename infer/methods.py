"""Ways of decoding one prompt, all measured alike: stock Transformers, its prompt lookup, our engine with and without
heads. The benchmark and the side-by-side answer of `medusa generate --compare` run these."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from medusa.adapter import MergedAdapter
from medusa.base_model import BaseModel
from medusa.drafter import Drafter, RootDrafter
from medusa.model import MedusaModel

from .generation import run_requests
from .request import Request

LOOKUP_TOKENS = 10  # Transformers' own suggestion for prompt_lookup_num_tokens


@dataclass(frozen=True)
class Sample:
    """One prompt decoded once. seconds: prefill to last token. num_steps: forwards after the prefill. num_drafted:
    tokens that these verified besides their roots; 0 where it is not known."""

    token_ids: list[int]
    seconds: float
    time_to_first_token_s: float
    num_steps: int
    num_drafted: int = 0


# (prompt_ids, max_new_tokens) -> Sample
Method = Callable[[list[int], int], Sample]

METHODS = {
    "hf": "stock transformers generate",
    "hf-lookup": "stock generate with its own prompt lookup",
    "ar": "this engine, nothing drafted",
    "medusa": "this engine, drafting as is the heads' default",
    "medusa-static": "this engine, the saved tree of the heads' guesses",
    "medusa-dynamic": "this engine, a tree grown anew in each step",
    "lookup": "this engine, drafting n-gram matches, without heads",
}


def make_methods(model: MedusaModel, stock: StockModel) -> dict[str, Method]:
    """Every way of running `model`, by the names of `METHODS`."""
    return {
        "hf": stock.method(),
        "hf-lookup": stock.method(prompt_lookup_num_tokens=LOOKUP_TOKENS),
        "ar": engine_method(model.base, RootDrafter),
        "medusa": engine_method(model.base, model.drafter),
        "medusa-static": engine_method(model.base, lambda: model.drafter(tree="static", lookup=False)),
        "medusa-dynamic": engine_method(model.base, lambda: model.drafter(tree="dynamic", lookup=False)),
        "lookup": engine_method(model.base, lambda: model.drafter(tree="none", lookup=True)),
    }


def engine_method(base_model: BaseModel, make_drafter: Callable[[], Drafter]) -> Method:
    def run(prompt_ids: list[int], max_new_tokens: int) -> Sample:
        request = Request(prompt_ids, max_new_tokens, base_model.eos_token_ids, base_model.tokenizer)
        drafter = make_drafter()
        start = time.perf_counter()
        for _ in run_requests(base_model, drafter, [request]):
            pass
        seconds, stats = time.perf_counter() - start, request.stats
        return Sample(request.token_ids, seconds, stats.time_to_first_token_s, stats.num_steps, stats.num_drafted)

    return run


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
    """The base model loaded once more, untouched by our packing, greedy whatever its generation config says."""

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
        settings = {"eos_token_id": eos, "pad_token_id": eos[0] if eos else 0, "do_sample": False}
        # Unset values are filled from the model's own generation config: a repetition penalty would change the answer.
        loaded.generation_config = GenerationConfig(**settings)
        return cls(loaded.to(base.device).eval(), settings)

    def method(self, **extra: Any) -> Method:
        def run(prompt_ids: list[int], max_new_tokens: int) -> Sample:
            ids = torch.tensor([prompt_ids], device=self.model.device)
            config = GenerationConfig(**self.settings, max_new_tokens=max_new_tokens, **extra)
            clock, mask, start = _Clock(), torch.ones_like(ids), time.perf_counter()
            output = self.model.generate(ids, attention_mask=mask, generation_config=config, streamer=clock)
            end = time.perf_counter()
            _, first, *later = clock.times
            return Sample(output[0, len(prompt_ids) :].tolist(), end - start, first - start, len(later))

        return run

    @torch.inference_mode()
    def top_two_gap(self, token_ids: list[int]) -> float:
        """Difference of the two highest logits after `token_ids`."""
        ids = torch.tensor([token_ids], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        return float(best - second)
