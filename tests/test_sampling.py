"""Settings, truncations and penalties, each against what Transformers itself does; and the draw."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa import logits as logits_module
from medusa.logits import draw, penalise, warp
from medusa.row_sampler import RowSampler, RowSamplers
from medusa.sampling import GREEDY_SAMPLING, SamplingParams, Typical, choose_acceptance
from tiny_models import tiny_model

pytestmark = pytest.mark.transformers_compat


def random_logits(kind, rows=40, size=299):
    """Kinds: spread out; peaked; with many ties, as bfloat16 makes them; one value only."""
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(3)) * 3
    return {"spread": logits / 3, "peaked": logits * 2, "ties": (logits / 2).round(), "flat": logits * 0}[kind]


SETTINGS = {
    "temperature": (SamplingParams(0.7), [TemperatureLogitsWarper(0.7)]),
    "top-k": (SamplingParams(top_k=7), [TopKLogitsWarper(7)]),
    "top-k of more than there are": (SamplingParams(top_k=1000), [TopKLogitsWarper(1000)]),
    "top-p": (SamplingParams(top_p=0.9), [TopPLogitsWarper(0.9)]),
    "small top-p": (SamplingParams(top_p=1e-6), [TopPLogitsWarper(1e-6)]),
    "min-p": (SamplingParams(min_p=0.1), [MinPLogitsWarper(0.1)]),
    "all": (
        SamplingParams(1.5, top_k=50, top_p=0.8, min_p=0.05),
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(50), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
    ),
}


@pytest.mark.parametrize("first_look", [1024, 5])
@pytest.mark.parametrize("kind", ["spread", "peaked", "ties", "flat"])
@pytest.mark.parametrize("name", SETTINGS)
def test_truncations_are_those_of_transformers(name, kind, first_look, monkeypatch):
    monkeypatch.setattr(logits_module, "FIRST_LOOK", first_look)
    params, stock = SETTINGS[name]
    scores = random_logits(kind)
    result, expected = warp(scores, params), LogitsProcessorList(stock)(None, scores)
    if kind in ("ties", "flat"):  # which of equal tokens stock's top-p keeps is up to an unstable sort
        result, expected = result.sort().values, expected.sort().values
    assert torch.equal(result, expected)


def test_top_p_keeps_of_equal_tokens_only_what_it_needs():
    """0.4, then four of 0.15: 0.6 needs two of these; always the same two, that a seed may say the same."""
    scores = torch.tensor([[0.15, 0.4, 0.15, 0.15, 0.15]]).log()
    assert (warp(scores, SamplingParams(top_p=0.6)) > -torch.inf).tolist() == [[False, True, False, True, True]]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    scores = random_logits("spread", rows=3)
    context = torch.randint(0, 299, (3, 40))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(context, scores)
    params = SamplingParams(repetition_penalty=penalty)
    assert torch.equal(penalise(scores, context, context[:, 30:], params), expected)


def test_presence_and_frequency_penalties_see_the_output_only():
    scores = torch.zeros(2, 5)
    context = torch.tensor([[0, 1, 1, 1, 2], [0, 1, 3, 5, 5]])  # 5 is V: filled up
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    result = penalise(scores, context, context[:, 1:], params)
    assert result.tolist() == [[0, -1.25, -0.75, 0, 0], [0, -0.75, 0, -0.75, 0]]


def scores_of(params, prompt, output, logits):
    row = torch.zeros(1, dtype=torch.int64)
    sampler = RowSampler(params, prompt, output)
    return RowSamplers([sampler]).scores(row, row, logits, lambda row, node: [])


def test_scores_are_those_that_stock_generation_draws_from():
    """Penalty, a processor of the user's, truncations, in the order of `generate`, at every step of an answer."""
    prompt, model = [5, 6, 7, 5], tiny_model("llama")
    processors = (NoRepeatNGramLogitsProcessor(2),)
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4}
    torch.manual_seed(1)
    result = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=20,
        do_sample=True,
        logits_processor=LogitsProcessorList(processors),
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **settings,
    )
    output = result.sequences[0, len(prompt) :].tolist()
    params = SamplingParams(**settings, processors=processors)
    for n, (logits, scores) in enumerate(zip(result.logits, result.scores, strict=True)):
        assert torch.equal(scores_of(params, prompt, output[:n], logits), scores)
    assert len(output) == 20 and len(set(output)) > 5


def test_rows_with_other_settings_do_not_touch_each_other():
    """Six rows of three settings together, in any order, against each alone."""
    choices = [
        SamplingParams(0.7, top_p=0.9, seed=1),
        GREEDY_SAMPLING,
        SamplingParams(1.2, repetition_penalty=1.5, frequency_penalty=0.3, seed=2),
    ]
    rows = [(choices[i % 3], [i, 9], [i + 3] * (1 + i)) for i in range(6)]
    logits = random_logits("spread", rows=6, size=20)
    order = torch.tensor([4, 0, 5, 2, 1, 3])

    def drafted(row, node):
        return [row, row + 1][:node]

    together = RowSamplers([RowSampler(*row) for row in rows])
    scores = together.scores(order, order % 3, logits[order], drafted)
    tokens = together.choose(order, scores)
    for place, row in enumerate(order.tolist()):
        alone = RowSamplers([RowSampler(*rows[row])])
        zero = torch.zeros(1, dtype=torch.int64)
        path = drafted(row, row % 3)
        expected = alone.scores(zero, zero, logits[row, None], lambda row, node, path=path: path)
        assert torch.equal(scores[place], expected[0])
        assert tokens[place] == alone.choose(zero, expected)


def test_draws_are_the_inverse_of_the_cumulative_distribution():
    scores = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]).log()
    uniforms = torch.tensor([0.0, 0.1999, 0.2001, 0.6999, 0.7001, 1 - 2**-53], dtype=torch.float64)
    assert draw(scores.expand(6, -1), uniforms).tolist() == [1, 1, 3, 3, 4, 4]


def test_no_possible_token_is_an_error():
    with pytest.raises(ValueError, match="no token is possible; a logits processor excluded all"):
        draw(torch.full((1, 4), -torch.inf), torch.tensor([0.5], dtype=torch.float64))
    with pytest.raises(ValueError, match="no token is possible"):
        draw(warp(torch.full((1, 4), torch.nan), SamplingParams(top_p=0.9)), torch.tensor([0.5], dtype=torch.float64))


def test_a_seed_is_a_sequence_of_numbers():
    def numbers(seed):
        sampler = RowSampler(SamplingParams(seed=seed), [1], [])
        return [sampler.uniform() for _ in range(100)]

    assert numbers(7) == numbers(7) and numbers(7) != numbers(8) and numbers(None) != numbers(None)
    assert len(set(numbers(7))) == 100 and all(0 <= number < 1 for number in numbers(7))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": -1}, "temperature: got -1, expected 0 (greedy) or a finite number from 0.0001"),
        ({"temperature": 1e-9}, "temperature: got 1e-09, expected 0 (greedy)"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": "hot"}, "temperature: got 'hot'"),
        ({"temperature": True}, "temperature: got True"),
        ({"top_k": -1}, "top_k: got -1, expected a whole number from 0; 0 keeps all tokens"),
        ({"top_k": 1.5}, "top_k: got 1.5, expected a whole number"),
        ({"top_p": 0}, "top_p: got 0, expected a number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p: got 1.1"),
        ({"min_p": 2}, "min_p: got 2, expected a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0, expected a number above 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty: got inf, expected a finite number"),
        ({"frequency_penalty": None}, "frequency_penalty: got None"),
        ({"seed": 1.5}, "seed: got 1.5, expected a whole number"),
        ({"seed": 2**64}, "expected one of at most 64 bits"),
        ({"processors": ("no repeats",)}, "processors: got 'no repeats', expected Transformers LogitsProcessor"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError) as error:
        SamplingParams(**settings)
    assert message in str(error.value)


def test_acceptance_rules_that_do_not_fit_are_refused():
    sampled = SamplingParams(0.8)
    assert choose_acceptance(sampled, None) is None and choose_acceptance(sampled, "rejection") is None
    assert choose_acceptance(GREEDY_SAMPLING, "greedy") is None
    assert (
        choose_acceptance(sampled, "typical") == Typical() and choose_acceptance(sampled, Typical(0.2)).epsilon == 0.2
    )
    for sampling, acceptance, message in [
        (sampled, "greedy", "got greedy with temperature 0.8, expected temperature 0"),
        (GREEDY_SAMPLING, "typical", "got typical with temperature 0"),
        (sampled, "hopeful", "got 'hopeful', expected greedy, rejection or typical"),
    ]:
        with pytest.raises(ValueError, match=message):
            choose_acceptance(sampling, acceptance)
    with pytest.raises(ValueError, match="epsilon: got 0, expected a number above 0"):
        Typical(epsilon=0)
