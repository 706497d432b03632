"""`medusa bench`: several ways of decoding the same prompts, side by side, and whether their tokens are the same.

Methods take turns prompt by prompt, and so does the measurement of c(N), so that a drift of the machine's speed falls
on all of them. Greedy tokens are compared with `hf`'s; where they differ, the reference's own two best logits at that
place tell a numerical tie from a fault. Sampled, `hf` draws other tokens from the same distribution and is a reference
for speed only; `ar` and what drafts have the same seeds, so their tokens are compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console

from medusa.base_model import BaseModel
from medusa.latency_curve import latency_at
from medusa.model import MedusaModel
from medusa.sampling import GREEDY_SAMPLING, SamplingParams

from .generation import check_prompt, encode_prompt
from .latency import LatencyMeter
from .machine import describe_machine
from .methods import METHODS, Method, Sample, StockModel, for_prompt, make_methods
from .progress import token_progress
from .prompts import PromptRecord
from .ties import TIE_GAP, first_difference, gap_at

WARM_UP_TOKENS = 16
CURVE_SIZES = (1, 2, 4, 8, 16, 32)
Verdict = Literal["identical", "tie", "different"]
VERDICTS: tuple[Verdict, ...] = ("identical", "tie", "different")


@dataclass
class Tally:
    """What one method did over some prompts. verdicts: empty where its tokens are not compared."""

    samples: list[Sample] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, sample: Sample, verdict: Verdict | None) -> None:
        self.samples.append(sample)
        if verdict:
            self.verdicts.append(verdict)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / sum(sample.seconds for sample in self.samples)

    @property
    def mean_acceptance_length(self) -> float:
        """tau: tokens per step; the prefill and its token are not counted."""
        num_steps = sum(sample.num_steps for sample in self.samples)
        return (self.num_tokens - len(self.samples)) / num_steps if num_steps else 1.0

    @property
    def mean_num_nodes(self) -> float:
        """N: tokens that a step verified, the root included."""
        num_steps = sum(sample.num_steps for sample in self.samples)
        return 1.0 + sum(sample.num_drafted for sample in self.samples) / num_steps if num_steps else 1.0

    @property
    def propose_share(self) -> float:
        """Share of the time after the first token that drafting took."""
        decoding = sum(sample.seconds - sample.time_to_first_token_s for sample in self.samples)
        return sum(sample.propose_seconds for sample in self.samples) / decoding if decoding else 0.0

    @property
    def time_to_first_token_s(self) -> float:
        return sum(sample.time_to_first_token_s for sample in self.samples) / len(self.samples)


@dataclass
class BenchResult:
    """tallies: by method. by_category: the same prompts split, by method and category. divergences: each place where a
    method's tokens left the reference's."""

    model: MedusaModel
    max_new_tokens: int
    latency_curve: dict[int, float]
    tallies: dict[str, Tally]
    by_category: dict[str, dict[str, Tally]] = field(default_factory=dict)
    divergences: list[dict[str, Any]] = field(default_factory=list)
    sampling: SamplingParams = GREEDY_SAMPLING

    @property
    def num_prompts(self) -> int:
        return len(next(iter(self.tallies.values())).samples)

    @property
    def is_sampled(self) -> bool:
        return self.sampling.temperature > 0

    @property
    def reference(self) -> str:
        """The method that tokens are compared with."""
        return "ar" if self.is_sampled else "hf"

    def is_compared(self, name: str) -> bool:
        return not (self.is_sampled and name.startswith("hf"))

    @property
    def num_different(self) -> int:
        return sum(tally.verdicts.count("different") for tally in self.tallies.values())

    def speedup(self, name: str, over: str) -> float:
        return self.tallies[name].tokens_per_second / self.tallies[over].tokens_per_second

    def efficiency(self, name: str) -> float:
        """Measured speedup over `ar` by what tau and c(N) alone would give; 1 means that a step costs its forward.
        Where steps choose their own N it is the mean one that counts."""
        tally = self.tallies[name]
        cost = self.cost(tally.mean_num_nodes)
        return self.speedup(name, "ar") / (tally.mean_acceptance_length / cost)

    def cost(self, num_nodes: float) -> float:
        """c(N), between whole numbers too."""
        below, share = int(num_nodes), num_nodes % 1
        seconds = (1 - share) * latency_at(self.latency_curve, below)
        if share:
            seconds += share * latency_at(self.latency_curve, below + 1)
        return seconds / self.latency_curve[1]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "machine": describe_machine(),
            "base_model": self.model.base.name,
            "dtype": str(self.model.base.dtype).removeprefix("torch."),
            "num_prompts": self.num_prompts,
            "max_new_tokens": self.max_new_tokens,
            "sampling": _settings(self.sampling) if self.is_sampled else None,
            "tree_nodes": self.model.tree.num_nodes,
            "methods": {name: self._method(name) for name in self.tallies},
            "latency_curve": {str(size): seconds for size, seconds in self.latency_curve.items()},
            "divergences": self.divergences,
        }

    def _method(self, name: str) -> dict[str, Any]:
        tally = self.tallies[name]
        report = _report(tally, self.tallies, self.is_sampled)
        if "ar" in self.tallies and not name.startswith("hf"):
            report["efficiency"] = self.efficiency(name)
            report["mean_num_nodes"] = tally.mean_num_nodes
            report["propose_share"] = tally.propose_share
        report["by_category"] = {
            category: _report(tallies[name], tallies, self.is_sampled)
            for category, tallies in sorted(self.by_category.items())
        }
        return report


def _settings(sampling: SamplingParams) -> dict[str, Any]:
    settings = asdict(sampling)
    del settings["processors"]  # stock generation has none, so there are none
    return settings


def _report(tally: Tally, others: Mapping[str, Tally], is_sampled: bool) -> dict[str, Any]:
    report: dict[str, Any] = {
        "tokens_per_second": tally.tokens_per_second,
        "num_tokens": tally.num_tokens,
        "mean_acceptance_length": tally.mean_acceptance_length,
        "time_to_first_token_s": tally.time_to_first_token_s,
    }
    for other in ("hf", "ar"):
        if other in others:
            report[f"speedup_vs_{other}"] = tally.tokens_per_second / others[other].tokens_per_second
    for verdict in VERDICTS:  # of the comparison with hf
        report[f"num_prompts_{verdict}"] = None if is_sampled else tally.verdicts.count(verdict)
    if is_sampled and tally.verdicts:
        report["compared_with_ar"] = {verdict: tally.verdicts.count(verdict) for verdict in VERDICTS}
    return report


def bench(
    model: MedusaModel,
    stock: StockModel,
    prompts: Sequence[PromptRecord],
    *,
    methods: Sequence[str],
    max_new_tokens: int,
    console: Console,
    sampling: SamplingParams = GREEDY_SAMPLING,
    others: Mapping[str, Method] | None = None,
) -> BenchResult:
    """Answer the first turn of each prompt with every method, one sequence at a time.

    `hf` is always run, as the others are compared with it, and `ar` where `sampling` draws. others: methods of the
    caller's own, which take part too. Raises ValueError for an unknown method or a prompt that does not fit, before
    anything is decoded.
    """
    always = ("hf", "ar") if sampling.temperature > 0 else ("hf",)
    runs = _chosen(make_methods(model, stock, sampling), [*always, *methods]) | dict(others or {})
    encoded = encode_prompts(model.base, prompts, max_new_tokens)
    meter = LatencyMeter(model.base, sorted({*CURVE_SIZES, model.tree.num_nodes}))
    result = BenchResult(model, max_new_tokens, {}, {name: Tally() for name in runs}, sampling=sampling)
    for run in runs.values():
        run(encoded[0], min(WARM_UP_TOKENS, max_new_tokens))
    with token_progress(console, "prompts", len(prompts), "prompts") as progress:
        for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            samples = _take_turns(runs, number, ids, max_new_tokens)
            meter.round()
            _count(result, stock, prompt, ids, samples)
            progress.advance(1, tokens=sum(len(sample.token_ids) for sample in samples.values()))
    result.latency_curve = meter.curve()
    return result


def _chosen(runs: Mapping[str, Method], names: Iterable[str]) -> dict[str, Method]:
    names = list(dict.fromkeys(names))
    if unknown := [name for name in names if name not in runs]:
        raise ValueError(f"methods: got {', '.join(unknown)}, expected some of {', '.join(METHODS)}")
    return {name: runs[name] for name in names}


def encode_prompts(base_model: BaseModel, prompts: Sequence[PromptRecord], max_new_tokens: int) -> list[list[int]]:
    encoded = [encode_prompt(base_model.tokenizer, prompt.turns[0]) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        try:
            check_prompt(base_model, ids, max_new_tokens)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id}: {error}") from error
    return encoded


def _take_turns(runs: Mapping[str, Method], number: int, ids: list[int], max_new_tokens: int) -> dict[str, Sample]:
    """Each method once; who goes first moves on with each prompt."""
    names = list(runs)
    first = number % len(names)
    return {name: runs[name](ids, max_new_tokens) for name in names[first:] + names[:first]}


def _count(
    result: BenchResult, stock: StockModel, prompt: PromptRecord, ids: list[int], samples: Mapping[str, Sample]
) -> None:
    reference = samples[result.reference].token_ids
    category = result.by_category.setdefault(prompt.category, {}) if prompt.category else {}
    for name, tally in result.tallies.items():
        tokens = samples[name].token_ids
        verdict: Verdict | None = "identical" if result.is_compared(name) else None
        if verdict and tokens != reference:
            place = first_difference(tokens, reference)
            gap = gap_at(stock, for_prompt(result.sampling, ids), ids, reference, tokens)
            verdict = "tie" if gap < TIE_GAP else "different"
            result.divergences.append({"id": prompt.id, "method": name, "token": place, "gap": gap, "verdict": verdict})
        tally.add(samples[name], verdict)
        category.setdefault(name, Tally()).add(samples[name], verdict)
