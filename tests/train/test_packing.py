"""Packed conversations are trained on as if each were alone: no attention, position or label crosses their ends."""

from __future__ import annotations

import pytest
import torch

from medusa.base_model import BaseModel, adapt_base_model
from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.train.batching import Example, collate
from medusa.train.features import CachedHidden, FeatureLayout, OnlineHidden, compute_features, prepare_folder
from medusa.train.labels import gather_labels
from medusa.train.loss import LABELS, LOSS, LossSettings, accumulate_gradients, head_weights
from medusa.train.objectives import OBJECTIVES
from medusa.train.packing import assign_rows, pack
from medusa.train.run import train
from medusa.train.targets import Teacher, teacher_rows
from tiny_models import FAMILIES, SLIDING_FAMILIES, WINDOW, tiny_model, tiny_tokenizer

K = 3
ROW = 48
LENGTHS = [20, 7, 31, 12, 9, 2, 17]


def make_examples(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 100, (length,), generator=generator) for length in lengths]
    return [Example(tokens, torch.arange(len(tokens)) % 9 >= 4 - 3 * (i % 2)) for i, tokens in enumerate(ids)]


def make_base(family):
    return adapt_base_model(tiny_model(family), tiny_tokenizer(), name=family)


def make_heads(base):
    heads = MedusaHeads(HeadsConfig(K, 1, base.hidden_size, base.vocab_size, "own", None))
    heads.init_from_base(base.lm_head_weight, base.embedding_weight)
    return heads


def sums_of(base, heads, hidden, batch, objective):
    """Sums of loss.py over a batch whose rows of hidden states are `hidden`: float64 [K, NUM_SUMS]."""
    labels = gather_labels(batch.input_ids, batch.loss_mask, K, torch.arange(base.vocab_size))
    settings = LossSettings(head_weights(K, 0.8), 64, OBJECTIVES[objective], torch.float32)
    teacher = None
    if objective != "cross_entropy":
        targets = Teacher(base.lm_head_weight, base.lm_head_bias, base.finish_logits, 16).targets(hidden, 64)
        teacher = targets, teacher_rows(batch.loss_mask, K)
    with torch.no_grad():
        return accumulate_gradients(heads, hidden, labels.clamp(min=0), labels, settings, teacher).sums


def difference_to_alone(base, objective="cross_entropy"):
    """The largest difference of a document's mean loss of a head, packed with others, from that alone. Also asserts
    that the packed batch as a whole has the sum of them."""
    examples, heads = make_examples(), make_heads(base)
    whole = collate(examples)
    hidden = OnlineHidden(base, K, ROW).hidden(range(len(examples)), whole)
    worst, start, total = 0.0, 0, torch.zeros(K)
    for example in examples:
        batch = collate([example])
        states = OnlineHidden(base, K).hidden([0], batch)
        alone = sums_of(base, heads, states, batch, objective)
        rows, start = hidden[start : start + len(states)], start + len(states)
        packed = sums_of(base, heads, rows, batch, objective)
        total = total + packed[:, LOSS]
        worst = max(worst, ((packed - alone)[:, LOSS].abs() / alone[:, LABELS].clamp(min=1)).max().item())
    assert start == len(hidden)
    torch.testing.assert_close(sums_of(base, heads, hidden, whole, objective)[:, LOSS], total, rtol=1e-6, atol=1e-5)
    return worst


def forward_with(monkeypatch, change):
    """Packed forwards whose documents are changed beforehand."""
    own = BaseModel.packed_hidden_states
    monkeypatch.setattr(BaseModel, "packed_hidden_states", lambda self, ids, docs: own(self, ids, change(docs)))


@pytest.mark.transformers_compat
@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_has_the_loss_that_it_has_alone(family):
    assert difference_to_alone(make_base(family)) < 1e-5


@pytest.mark.parametrize("objective", ["distillation", "lk_hybrid"])
def test_the_teacher_does_not_look_across_either(objective):
    assert difference_to_alone(make_base("llama"), objective) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_mask_that_leaks_is_noticed(family, monkeypatch):
    """The negative control of the tests above: the rows as one document each."""
    forward_with(monkeypatch, torch.zeros_like)
    assert difference_to_alone(make_base(family)) > 1e-2


def test_a_window_that_is_left_out_is_noticed(monkeypatch):
    assert "mistral" in SLIDING_FAMILIES and max(LENGTHS) > WINDOW
    base = make_base("mistral")
    monkeypatch.setattr(BaseModel, "_by_layer_kind", lambda self, visible, distance, kind: kind(visible))
    assert difference_to_alone(base) > 1e-2


def test_positions_restart_with_each_document(monkeypatch):
    """Rotary positions are relative, so the losses alone would not show it."""
    base, seen = make_base("llama"), []
    forward = base.model.base_model.forward
    monkeypatch.setattr(base.model.base_model, "forward", lambda **kwargs: seen.append(kwargs) or forward(**kwargs))
    documents = torch.tensor([[4, 4, 4, 0, 0, -1], [2, 1, 1, 1, 1, 1]])
    base.packed_hidden_states(torch.ones(2, 6, dtype=torch.int64), documents)
    assert seen[0]["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


# ---- rows


def test_rows_hold_every_token_once_and_places_find_it():
    batch = collate(make_examples())
    rows = pack(batch, ROW)
    assert rows.input_ids.shape[1] <= ROW and len(rows.input_ids) < len(LENGTHS)
    assert int((rows.documents >= 0).sum()) == sum(LENGTHS)
    mask = batch.attention_mask
    assert torch.equal(rows.input_ids.flatten()[rows.places][mask], batch.input_ids[mask])
    expected = torch.arange(len(LENGTHS))[:, None].expand_as(mask)
    assert torch.equal(rows.documents.flatten()[rows.places][mask], expected[mask])


def test_first_fit_decreasing():
    assert assign_rows([3, 9, 4, 6, 1], 10) == [[1, 4], [3, 2], [0]]
    assert assign_rows([12, 3, 5], 10) == [[0], [2, 1]]  # one that is too long has a row of its own
    assert assign_rows([], 10) == []


# ---- whole runs


def test_packed_training_has_the_losses_of_padded_training(make_config, read_metrics):
    for objective in ("cross_entropy", "distillation"):
        settings = {"optim__epochs": 2, "loss__objective": objective, "data__group_by_length": False}
        losses = {}
        for name, more in {
            "padded": {},
            "packed": {"data__packing": True},
            "cached": {"data__packing": True, "train__cache_hidden_states": True},
        }.items():
            train(make_config(name + objective, **settings, **more))
            losses[name] = [record["loss"] for record in read_metrics(name + objective)]
        assert losses["packed"] == pytest.approx(losses["padded"], abs=1e-5)
        assert losses["cached"] == pytest.approx(losses["padded"], abs=1e-5)


def test_cached_features_are_the_same_packed(tmp_path):
    base, examples = make_base("llama"), make_examples(LENGTHS * 4)
    layout = FeatureLayout(tmp_path / "features", examples, K, base.hidden_size, torch.float32)
    prepare_folder(layout, "a")
    compute_features(layout, OnlineHidden(base, K, ROW), 8, range(len(layout.shards)), lambda *news: None)
    indices = [20, 3, 5, 11]
    batch = collate([examples[i] for i in indices])
    expected = OnlineHidden(base, K).hidden(indices, batch)
    torch.testing.assert_close(CachedHidden(layout).hidden(indices, batch), expected, atol=1e-5, rtol=1e-5)
