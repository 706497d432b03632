"""Fingerprints: equal for the same weights however loaded, different after any change."""

from __future__ import annotations

import pytest
import torch

from medusa.fingerprint import fingerprint, full_fingerprint
from medusa.linear import pack_linears
from tiny_models import tiny_model


def test_a_model_is_itself_in_float32_and_bfloat16():
    assert fingerprint(tiny_model()) == fingerprint(tiny_model()) == fingerprint(tiny_model().to(torch.bfloat16))


def test_other_weights_or_shapes_are_another_model():
    prints = [
        fingerprint(m) for m in (tiny_model(), tiny_model(seed=1), tiny_model("qwen2"), tiny_model(num_hidden_layers=1))
    ]
    assert len(set(prints)) == 4


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_a_change_anywhere_shows(name):
    model = tiny_model()
    cheap, full = fingerprint(model), full_fingerprint(model)
    with torch.no_grad():
        model.get_parameter(name).mul_(1.1)
    assert fingerprint(model) != cheap and full_fingerprint(model) != full


def test_the_full_fingerprint_sees_the_last_bit():
    model = tiny_model()
    before = full_fingerprint(model)
    weight = model.lm_head.weight.data.view(torch.int32)
    weight[3, 5] ^= 1
    assert full_fingerprint(model) != before
    weight[3, 5] ^= 1
    assert full_fingerprint(model) == before


def test_packed_models_have_no_fingerprint():
    model = tiny_model()
    pack_linears(model)
    with pytest.raises(AssertionError, match="before pack_linears"):
        fingerprint(model)
