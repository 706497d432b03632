"""Ranks on held-out text against brute force, and the tree that follows from them."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from medusa.base_model import adapt_base_model
from medusa.budget import AdaptiveBudget
from medusa.calibration import Calibration
from medusa.config import HeadsConfig
from medusa.dynamic_statistics import DynamicStatistics
from medusa.dynamic_tree import DynamicTreeDrafter
from medusa.heads import MedusaHeads
from medusa.infer.calibrate import calibrate
from medusa.infer.evaluate import MAX_RANK, PLAUSIBLE, evaluate, full_positions
from medusa.infer.latency import (
    BATCH_SIZES,
    BATCHES,
    SIZES,
    BatchMeter,
    LatencyMeter,
    measure_latency,
    measure_propose,
)
from medusa.infer.machine import describe_machine
from medusa.infer.simulate import simulate
from medusa.latency_curve import StepLatency
from medusa.model import MedusaModel
from medusa.temperature import TemperatureFit
from medusa.train.batching import Example
from medusa.tree import DraftTree
from tiny_models import tiny_model, tiny_tokenizer

K = 3
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def base():
    return adapt_base_model(tiny_model("llama"), tiny_tokenizer(), name="tiny")


def make_heads(base, draft_ids=None):
    size = None if draft_ids is None else len(draft_ids)
    heads = MedusaHeads(HeadsConfig(K, 1, 32, 128, draft_vocab_size=size), draft_ids)
    heads.init_from_base(base.lm_head_weight, base.embedding_weight)
    with torch.no_grad():
        for parameter in heads.blocks.parameters():
            parameter.normal_()
    return heads


def make_texts(count=6):
    generator = torch.Generator().manual_seed(3)
    texts = []
    for number in range(count):
        ids = torch.randint(3, 128, (20 + number,), generator=generator)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[6:12] = mask[15:] = True  # two answers
        texts.append(Example(ids, mask, "even" if number % 2 == 0 else None))
    return texts


def brute_force(base, heads, texts):
    """matches of each position, one at a time, by sorting."""
    found = []
    for text in texts:
        ids, mask = text.input_ids, text.loss_mask
        hidden = base.hidden_states(ids[None], torch.ones_like(ids[None]))[0]
        for t in range(len(ids)):
            window = mask[t + 1 : t + K + 2]
            if len(window) == K + 1 and window.all():
                path = []
                for k in range(K):
                    with torch.no_grad():
                        best = heads.draft_to_base(heads(hidden[t])[k].argsort(descending=True)).tolist()[:MAX_RANK]
                    if (token := int(ids[t + k + 2])) not in best:
                        break
                    path.append(best.index(token))
                found.append(tuple(path))
    return found


@pytest.mark.parametrize("draft_ids", [None, torch.arange(3, 128, 2)], ids=["all tokens", "draft vocabulary"])
def test_statistics_are_those_of_brute_force(base, draft_ids):
    heads, texts = make_heads(base, draft_ids), make_texts()
    evaluation = evaluate(base, heads, texts)
    expected = brute_force(base, heads, texts)
    assert evaluation.statistics.num_positions == len(expected) > 20
    assert +evaluation.statistics.matches == {path: expected.count(path) for path in set(expected)}
    even = evaluate(base, heads, texts[::2]).statistics
    assert evaluation.by_category.keys() == {"even"} and evaluation.by_category["even"].matches == even.matches


@pytest.mark.parametrize("independent", [True, False], ids=["independent", "given the prefix"])
def test_perfect_heads_have_perfect_accuracy(base, independent, monkeypatch):
    """Heads whose top guess is made to be right: a mistake of one position anywhere would show."""

    class Oracle(MedusaHeads):
        def logits(self, head, hidden, prefix):
            logits = torch.zeros(len(hidden), 128)
            place = {tuple(row): t for t, row in enumerate(self.states.tolist())}
            for row, state in enumerate(hidden.tolist()):
                t = place[tuple(state)]
                if prefix[row].tolist() == self.ids[t + 1 : t + head + 2].tolist():
                    logits[row, self.ids[t + head + 2]] = 1
            return logits

        def forward(self, hidden):
            prefixes = [self.ids.new_tensor([self.prefix_of(state, k) for state in hidden.tolist()]) for k in range(K)]
            return torch.stack([self.logits(k, hidden, prefixes[k]) for k in range(K)])

        def prefix_of(self, state, head):
            t = self.states.tolist().index(state)
            return self.ids[t + 1 : t + head + 2].tolist()

    oracle = Oracle(HeadsConfig(K, 1, 32, 128))
    monkeypatch.setattr("medusa.heads_drafter.is_independent", lambda heads: independent)
    text = make_texts(1)[0]
    oracle.ids, oracle.states = text.input_ids, base.hidden_states(text.input_ids[None], torch.ones(1, 20))[0]
    report = evaluate(base, oracle, [text]).to_dict()
    assert [head["top1"] for head in report["accuracy"]] == [1.0] * K and report["tau_chain"] == K + 1


def test_texts_without_answers_long_enough_are_refused(base):
    short = Example(torch.arange(3, 13), torch.arange(10) >= 7)
    with pytest.raises(ValueError, match="none of 1 conversations has 4 answer tokens in a row"):
        evaluate(base, make_heads(base), [short])


def test_calibration_chooses_on_one_half_and_reports_on_the_other(base, tmp_path):
    model = MedusaModel(base, make_heads(base), DraftTree.chain(K))
    texts = make_texts()
    chosen = calibrate(model, texts, QUIET)
    halves = [evaluate(base, model.heads, part).statistics for part in (texts[::2], texts[1::2])]
    assert chosen.statistics.matches == halves[0].matches
    assert chosen.held_out_tau == pytest.approx(halves[1].expected_length(chosen.tree))
    assert chosen.latency_curve.keys() >= {1, 8, 16} and chosen.propose_seconds > 0
    assert chosen.by_rows.keys() == {4, 8, 16} and all(batch.propose_seconds > 0 for batch in chosen.by_rows.values())
    assert chosen.machine["torch"] == torch.__version__
    assert len(chosen.temperatures) == K and all(0.2 < t < 8 for t in chosen.temperatures)
    kept = chosen.dynamic.kept
    assert kept[0] == 1.0 and list(kept) == sorted(kept) and 1.0 <= chosen.dynamic.num_nodes <= len(kept)
    chosen.save(tmp_path / "tree.json")
    assert Calibration.load(tmp_path / "tree.json").tree == chosen.tree
    with pytest.raises(ValueError, match=r"got 1 conversation\(s\), expected at least 2"):
        calibrate(model, texts[:1], QUIET)


def test_a_temperature_is_fitted_where_its_head_is_asked(base):
    """Only below guesses of earlier heads that are plausible, and never where the token is outside the vocabulary."""
    heads, texts = make_heads(base, torch.arange(3, 128, 2)), make_texts()
    fits = [TemperatureFit() for _ in range(K)]
    evaluate(base, heads, texts, fits=fits)
    expected = [0] * K
    for text in texts:
        ids = text.input_ids
        hidden = base.hidden_states(ids[None], torch.ones_like(ids[None]))[0]
        for t in full_positions(text.loss_mask, K).tolist():
            with torch.no_grad():
                best = heads.draft_to_base(heads(hidden[t]).topk(PLAUSIBLE).indices).tolist()
            for k in range(K):
                expected[k] += int(ids[t + k + 2]) % 2
                if int(ids[t + k + 2]) not in best[k]:
                    break
    assert [fit.num_positions for fit in fits] == expected and expected[0] > expected[1] > 0


def test_dynamic_trees_are_simulated_at_the_positions_that_are_evaluated(base):
    """Each position walked by hand."""
    heads, texts = make_heads(base), make_texts()
    drafter = DynamicTreeDrafter(heads, 300)
    num_kept = 0
    for text in texts:
        hidden = base.hidden_states(text.input_ids[None], torch.ones_like(text.input_ids[None]))[0]
        for t in full_positions(text.loss_mask, K).tolist():
            candidates = drafter.candidates(text.input_ids[t + 1 : t + 2], hidden[t : t + 1])
            node, tokens = 0, text.input_ids[t + 2 : t + K + 2].tolist()
            for token in tokens:
                below = (candidates.parent[0] == node) & (candidates.tokens[0] == token)
                if not below.any():
                    break
                node = int(below.int().argmax())
                num_kept += 1
    statistics = DynamicStatistics(AdaptiveBudget(StepLatency({1: 1.0})))
    simulate(base, drafter, K, texts, statistics)
    assert num_kept > 5 and statistics.num_positions == evaluate(base, heads, texts).statistics.num_positions
    assert statistics.summary().kept[-1] == pytest.approx(1 + num_kept / statistics.num_positions)


def test_latency_is_measured_at_every_size_within_the_context(base):
    rounds = []
    curve = measure_latency(base, 2, on_round=lambda: rounds.append(1))
    assert set(curve) == set(SIZES) and min(curve.values()) > 0 and len(rounds) == 2
    meter = LatencyMeter(base, (1, 5), context=10_000)
    meter.round()
    assert meter.curve().keys() == {1, 5}
    with pytest.raises(ValueError, match="256 tokens do not fit the model's context of 256"):
        LatencyMeter(base, (1, 256))
    roots, states = torch.tensor([5, 6, 7]), torch.randn(3, 32)
    drafter = MedusaModel(base, make_heads(base), DraftTree.chain(2)).drafter()
    assert measure_propose(base, drafter, roots, states, num_rows=4, rounds=3) > 0


def test_steps_of_several_rows_are_measured_within_the_context(base):
    meter = BatchMeter(base)
    meter.round()
    curves = meter.curves()
    assert set(curves) == set(BATCHES) and all(set(curve) == set(BATCH_SIZES) for curve in curves.values())
    assert min(min(curve.values()) for curve in curves.values()) > 0
    with pytest.raises(ValueError, match="steps do not fit the model's context of 64"):
        BatchMeter(adapt_base_model(tiny_model("llama", max_position_embeddings=64), tiny_tokenizer(), name="short"))


def test_the_machine_is_described_in_json():
    machine = json.loads(json.dumps(describe_machine()))
    assert machine["cpu"] and machine["cores"] >= 1 and machine["threads"] >= 1
