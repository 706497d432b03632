"""The benchmark's judgement: what counts as identical, as a tie, as different; and its arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rich.console import Console

from medusa.base_model import adapt_base_model
from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.infer import bench as bench_module
from medusa.infer.bench import BenchResult, Tally, bench
from medusa.infer.methods import Sample, StockModel, make_methods
from medusa.infer.prompts import PromptRecord
from medusa.infer.ties import first_difference
from medusa.model import MedusaModel
from medusa.sampling import SamplingParams
from medusa.tree import DraftTree
from tiny_models import save_tiny_base, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat


@pytest.fixture(scope="module")
def model():
    base = adapt_base_model(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    heads = MedusaHeads(HeadsConfig(num_heads=2, num_layers=1, hidden_size=32, vocab_size=128))
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    return MedusaModel(base, heads, DraftTree.cartesian([3, 2]))


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    model.base.name = str(save_tiny_base(tmp_path_factory.mktemp("stock")))
    return StockModel.load(model.base)


PROMPTS = [PromptRecord(str(i), [f"Question {i}"], "odd" if i % 2 else None) for i in range(3)]


def run_bench(model, stock, methods=("ar", "medusa"), **options):
    settings = {"methods": methods, "max_new_tokens": 12, "console": Console(quiet=True)}
    return bench(model, stock, PROMPTS, **(settings | options))


def test_all_methods_give_the_same_tokens(model, stock):
    result = run_bench(model, stock, ("hf-lookup", "ar", "medusa"))
    assert list(result.tallies) == ["hf", "hf-lookup", "ar", "medusa"]
    for tally in result.tallies.values():
        assert tally.verdicts == ["identical"] * 3 and tally.num_tokens == 36
    assert result.divergences == [] and result.num_different == 0
    assert {name: len(t.samples) for name, t in result.by_category["odd"].items()}.keys() == result.tallies.keys()
    assert len(result.by_category["odd"]["ar"].samples) == 1


def test_settings_of_the_checkpoint_do_not_reach_stock_generation(model, stock, tmp_path):
    """A repetition penalty in generation_config.json would make stock's own answer another one."""
    from transformers import GenerationConfig

    folder = save_tiny_base(tmp_path / "penalised")
    GenerationConfig(repetition_penalty=5.0, do_sample=True, temperature=2.0, max_new_tokens=3).save_pretrained(folder)
    base = adapt_base_model(tiny_model("llama"), tiny_tokenizer(), name=str(folder))
    penalised = StockModel.load(base).method()([5, 6, 7], 20)
    assert penalised.token_ids == stock.method()([5, 6, 7], 20).token_ids and len(penalised.token_ids) == 20


def test_steps_and_first_token_are_counted_alike(model, stock):
    methods = make_methods(model, stock)
    for name in ("hf", "ar"):
        sample = methods[name]([5, 6, 7], 10)
        assert sample.num_steps == 9 and 0 < sample.time_to_first_token_s < sample.seconds
    assert methods["hf-lookup"]([5, 6, 7] * 5, 20).num_steps <= 19


@pytest.mark.parametrize("gap, verdict", [(5e-4, "tie"), (2e-3, "different")])
def test_a_difference_is_judged_by_the_references_own_gap(model, stock, monkeypatch, gap, verdict):
    asked = []

    def top_two_gap(self, ids):
        asked.append(ids)
        return gap

    right = make_methods(model, stock)

    def one_wrong_token(prompt_ids, max_new_tokens):
        sample = right["ar"](prompt_ids, max_new_tokens)
        sample.token_ids[5] = (sample.token_ids[5] + 1) % 128
        return sample

    monkeypatch.setattr(StockModel, "top_two_gap", top_two_gap)
    monkeypatch.setattr(bench_module, "make_methods", lambda *_: right | {"ar": one_wrong_token})
    result = run_bench(model, stock)
    assert result.tallies["ar"].verdicts == [verdict] * 3 and result.tallies["medusa"].verdicts == ["identical"] * 3
    assert result.num_different == (3 if verdict == "different" else 0)
    assert [(d["id"], d["method"], d["token"]) for d in result.divergences] == [(str(i), "ar", 5) for i in range(3)]
    reference = result.tallies["hf"].samples[0].token_ids
    assert asked[0][-5:] == reference[:5] and len(asked[0]) > 5


def test_the_gap_is_that_of_the_models_next_token(model, stock):
    ids = [5, 9, 20, 33]
    logits = model.base.model(input_ids=torch.tensor([ids])).logits[0, -1]
    best, second = logits.sort(descending=True).values[:2].tolist()
    assert stock.top_two_gap(ids) == pytest.approx(best - second, abs=1e-4)


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2


def sample(num_tokens, seconds, num_steps, num_drafted=0, propose_seconds=0.0):
    return Sample(list(range(num_tokens)), seconds, 0.5, num_steps, num_drafted, propose_seconds)


def test_numbers_follow_from_the_samples(model):
    """tau leaves the prefill's token out; efficiency is speedup over ar by tau / c(N)."""
    tallies = {name: Tally() for name in ("hf", "ar", "medusa")}
    tallies["hf"].add(sample(11, 20.0, 10), "identical")
    tallies["ar"].add(sample(11, 10.0, 10), "identical")
    for num_drafted in (4 * 8, 4 * 10):  # N is 9 in one sample's steps and 11 in the other's
        tallies["medusa"].add(sample(11, 6.25, 4, num_drafted, propose_seconds=num_drafted / 64), "identical")
    curve = {1: 1.0, 8: 1.4, 16: 3.0}
    result = BenchResult(model, 11, curve, tallies)
    medusa = result.to_dict()["methods"]["medusa"]
    assert medusa["mean_num_nodes"] == 10  # c(10) = 1.4 + (3.0 - 1.4) / 8 * 2 = 1.8
    assert medusa["mean_acceptance_length"] == pytest.approx(2.5)
    assert medusa["speedup_vs_ar"] == pytest.approx(1.6) and medusa["speedup_vs_hf"] == pytest.approx(3.2)
    assert medusa["efficiency"] == pytest.approx(1.6 / (2.5 / 1.8))
    assert medusa["propose_share"] == pytest.approx((0.5 + 0.625) / (2 * (6.25 - 0.5)))
    assert result.to_dict()["methods"]["ar"]["efficiency"] == pytest.approx(1.0)
    assert "efficiency" not in result.to_dict()["methods"]["hf"]


def test_nodes_are_counted_where_the_forward_has_them(model, stock):
    methods = make_methods(model, stock)
    found = methods["medusa-static"]([5, 6, 7], 20)
    assert found.num_drafted == found.num_steps * (model.tree.num_nodes - 1)
    assert methods["ar"]([5, 6, 7], 20).num_drafted == 0


def test_the_time_of_drafting_is_part_of_the_answers(model, stock):
    methods = make_methods(model, stock)
    found = methods["medusa-static"]([5, 6, 7], 20)
    assert 0 < found.propose_seconds < found.seconds - found.time_to_first_token_s
    assert methods["hf"]([5, 6, 7], 20).propose_seconds == 0


def test_methods_of_the_callers_own_are_judged_like_others(model, stock):
    right = make_methods(model, stock)["medusa"]

    def wrong(ids, count):
        answer = right(ids, count)
        return replace(answer, token_ids=[*answer.token_ids[:-1], 1 - answer.token_ids[-1] % 2])

    result = run_bench(model, stock, ("ar",), others={"mine: medusa": right, "mine: wrong": wrong})
    assert list(result.tallies) == ["hf", "ar", "mine: medusa", "mine: wrong"]
    assert result.tallies["mine: medusa"].verdicts == ["identical"] * 3
    assert result.tallies["mine: wrong"].verdicts == ["different"] * 3


def test_what_needs_a_calibration_says_so(model, stock):
    with pytest.raises(ValueError, match="no budget and no calibration to choose one by.*medusa calibrate"):
        run_bench(model, stock, ("ar", "medusa-dynamic"))


def test_methods_take_turns_in_going_first(model, stock, monkeypatch):
    order = []
    right = make_methods(model, stock)

    def noted(name):
        return lambda ids, count: order.append(name) or right[name](ids, count)

    monkeypatch.setattr(bench_module, "make_methods", lambda *_: {name: noted(name) for name in right})
    run_bench(model, stock)
    assert order[3:] == ["hf", "ar", "medusa", "ar", "medusa", "hf", "medusa", "hf", "ar"]


SAMPLED = SamplingParams(0.7, top_p=0.95, seed=3)


def test_sampled_answers_are_compared_with_those_of_the_same_seed(model, stock):
    result = run_bench(model, stock, ("medusa", "hf-lookup"), sampling=SAMPLED)
    assert list(result.tallies) == ["hf", "ar", "medusa", "hf-lookup"] and result.num_different == 0
    report = result.to_dict()
    assert report["sampling"] == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 3,
    }
    for name, method in report["methods"].items():
        assert [method[f"num_prompts_{verdict}"] for verdict in ("identical", "tie", "different")] == [None] * 3
        compared = {"identical": 3, "tie": 0, "different": 0}
        assert method.get("compared_with_ar") == (None if name.startswith("hf") else compared)
        assert method["num_tokens"] == 36 and method["speedup_vs_hf"] > 0
    assert run_bench(model, stock).to_dict()["sampling"] is None


def test_each_prompt_is_drawn_with_a_seed_of_its_own_the_same_every_time(model, stock):
    methods = make_methods(model, stock, SAMPLED)
    for name in ("hf", "ar", "medusa"):
        first, again, other = (methods[name](ids, 30).token_ids for ids in ([5, 6, 7], [5, 6, 7], [7, 6, 5]))
        assert first == again != other
    greedy = make_methods(model, stock)["hf"]([5, 6, 7], 30).token_ids
    assert methods["hf"]([5, 6, 7], 30).token_ids != greedy


def test_a_wrong_sampled_token_is_found(model, stock, monkeypatch):
    right = make_methods(model, stock, SAMPLED)

    def one_wrong_token(prompt_ids, max_new_tokens):
        sample = right["medusa"](prompt_ids, max_new_tokens)
        sample.token_ids[5] = (sample.token_ids[5] + 64) % 128
        return sample

    monkeypatch.setattr(bench_module, "make_methods", lambda *_: right | {"medusa": one_wrong_token})
    result = run_bench(model, stock, sampling=SAMPLED)
    assert result.tallies["medusa"].verdicts == ["different"] * 3 and result.num_different == 3
    assert [(d["method"], d["token"]) for d in result.divergences] == [("medusa", 5)] * 3


def test_settings_that_stock_does_not_have_are_refused(model, stock):
    with pytest.raises(ValueError, match="presence_penalty, frequency_penalty or processors, which it does not have"):
        run_bench(model, stock, sampling=SamplingParams(presence_penalty=0.5))
