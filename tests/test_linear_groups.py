"""Grouped layers are the layers they replace, whatever they are called with and in whatever order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medusa import linear
from medusa.linear import FastLinear, grouping_pays, pack_linears
from medusa.linear_groups import GroupedLinear, LinearGroup, group_linears
from tiny_models import FAMILIES, tiny_model


def layers(*biases: bool) -> list[nn.Linear]:
    return [nn.Linear(8, 4 + index, bias=bias) for index, bias in enumerate(biases)]


def grouped(members: list[nn.Linear]) -> list[GroupedLinear]:
    group = LinearGroup(members)
    return [GroupedLinear(group, index) for index in range(len(members))]


@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 5, 8)])
def test_parts_are_the_layers_outputs(biases, shape):
    members = layers(*biases)
    x = torch.randn(shape)
    for new, old in zip(grouped(members), members, strict=True):
        assert (new.in_features, new.out_features) == (old.in_features, old.out_features)
        torch.testing.assert_close(new(x), old(x))


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 1, 0, 2, 2], [0, 0, 1, 2, 1]])
def test_any_order_of_calls_is_right(order):
    members = layers(False, True, False)
    parts = grouped(members)
    for x in torch.randn(3, 2, 8):
        for index in order:
            torch.testing.assert_close(parts[index](x), members[index](x))


def test_another_input_is_not_answered_with_the_last_ones_product():
    members = layers(True, True)
    first, second = grouped(members)
    x, y = torch.randn(2, 3, 8)
    first(x)
    torch.testing.assert_close(second(y), members[1](y))
    torch.testing.assert_close(second(x), members[1](x))


def test_one_product_serves_the_group_and_nothing_is_kept():
    parts = grouped(layers(False, False, False))
    calls = []
    parts[0].group.linear.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 8)
    for part in parts:
        part(x)
    assert len(calls) == 1
    assert parts[0].group._input is None and parts[0].group._parts == ()


class Odd(nn.Module):
    """a and b share their input; c has a copy of it; d is called twice; e never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) + self.c(x.clone()) + self.d(self.d(x))


def test_only_layers_that_share_their_input_are_grouped():
    model, x = Odd(), torch.randn(3, 8)
    before = model(x)
    asked: list[list[list[torch.Tensor]]] = []
    weights = [model.a.weight, model.b.weight]
    assert group_linears(model, lambda: model(x), lambda groups: bool(asked.append(groups))) == 0
    assert [[weight.data_ptr() for weight in group] for group in asked[0]] == [[w.data_ptr() for w in weights]]
    assert type(model.a) is nn.Linear and len(asked) == 1
    assert group_linears(model, lambda: model(x), lambda groups: True) == 1
    assert [type(layer) is GroupedLinear for layer in (model.a, model.b, model.c, model.d, model.e)] == [
        True, True, False, False, False,
    ]  # fmt: skip
    torch.testing.assert_close(model(x), before)


@pytest.mark.transformers_compat
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_stays_the_same_function(family):
    model = tiny_model(family)
    ids = torch.randint(0, 100, (2, 7))
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        count = sum(layer.weight.numel() for layer in model.modules() if type(layer) is nn.Linear)
        groups = group_linears(model, lambda: model(input_ids=ids[:1, :3]), lambda groups: True)
        assert sum(layer.weight.numel() for layer in model.modules() if type(layer) is nn.Linear) == count
        for _ in range(2):
            torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-4, rtol=1e-4)
        pack_linears(model)
        torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-4, rtol=1e-4)
    assert sum(isinstance(layer, FastLinear) for layer in model.modules()) > groups
    if family == "llama":  # query, key and value; gate and up
        assert groups == 2 * model.config.num_hidden_layers


def test_what_is_faster_decides(monkeypatch):
    """Measured seconds: by each weight 5 x 1; together 5 x what the test says."""
    groups = [[torch.randn(4, 8), torch.randn(6, 8)] for _ in range(3)]

    def measured(cost):
        def measure(weights):
            seconds = {tuple(w.shape): 1.0 if len(w) < 10 else cost for w in weights}
            return {shape: dict.fromkeys(("plain", "transposed", "packed"), (s,) * 5) for shape, s in seconds.items()}

        return measure

    monkeypatch.setattr(linear, "measure_kernels", measured(1.9))
    assert grouping_pays(groups)
    monkeypatch.setattr(linear, "measure_kernels", measured(2.1))
    assert not grouping_pays(groups)
    monkeypatch.setattr(linear, "measure_kernels", measured(1.9))
    assert not grouping_pays([[weight.bfloat16() for weight in group] for group in groups])
