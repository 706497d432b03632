"""The kernels are one product; the plan follows from the measured seconds; packing touches what it should."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medusa import linear
from medusa.linear import (
    EXACT,
    FORM_PLANS,
    KERNELS,
    PLAIN_PLAN,
    FastLinear,
    LinearPlan,
    choose_plan,
    pack_linears,
)
from tiny_models import tiny_model

PACKED_PLAN, ROUNDED_PLAN = FORM_PLANS["packed"], FORM_PLANS["rounded"]
MIXED = LinearPlan(("plain", "transposed", "transposed", "plain", "transposed"), "plain")


PLANS = {"plain": PLAIN_PLAN, "mixed": MIXED} | {name: FORM_PLANS[name] for name in EXACT if name in FORM_PLANS}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 4), (1, 8), (5, 3), (1, 33), (3, 40), (2, 150)])
def test_every_plan_is_f_linear(plan, has_bias, shape):
    reference = nn.Linear(24, 40, bias=has_bias)
    fast = FastLinear(reference.weight, reference.bias, plan)
    x = torch.randn(*shape, 24)
    with torch.no_grad():
        for value in (x, x.transpose(0, 1), torch.randn(*shape, 48)[..., ::2], x[0]):
            torch.testing.assert_close(fast(value), reference(value), atol=1e-5, rtol=1e-5)


def test_which_kernel_multiplies_how_many_rows():
    rows = {n: MIXED.kernel(n) for n in (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 500)}
    assert rows == {1: "plain", 2: "transposed", 4: "transposed", 5: "transposed", 8: "transposed", 9: "plain",
                    16: "plain", 17: "transposed", 32: "transposed", 33: "plain", 500: "plain"}  # fmt: skip


def test_the_plan_is_the_fastest_as_measured():
    seconds = {"plain": (1, 4, 4, 4, 9), "transposed": (2, 3, 5, 3, 8), "packed": (3, 3, 3, 3, 7.1)}
    assert choose_plan(seconds).by_rows == ("plain", "transposed", "plain", "transposed", "transposed")
    assert choose_plan(seconds | {"packed": (3, 3, 3, 3, 6)}) == PACKED_PLAN
    assert choose_plan(seconds | {"packed": (3, 3, 3, 3, 6), "mkl": (3, 3, 3, 3, 5)}) == FORM_PLANS["mkl"]
    assert choose_plan(seconds | {"packed": (3, 3, 3, 3, 6), "rounded": (3, 3, 3, 3, 5)}) == ROUNDED_PLAN


def test_rounded_weights_are_near_and_only_where_they_are_allowed(monkeypatch):
    tried: list[set[str]] = []
    monkeypatch.setattr(linear, "can_round", lambda: True)
    monkeypatch.setattr(linear, "choose_plan", lambda seconds: tried.append(set(seconds)) or ROUNDED_PLAN)
    layer = nn.Linear(64, 32)
    x = torch.randn(3, 64)
    exact = layer(x)
    model = nn.Sequential(layer)
    pack_linears(model, may_round=True)
    rounded = model(x)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.02 * exact.abs().max()
    pack_linears(nn.Sequential(nn.Linear(8, 8)))
    monkeypatch.setattr(linear, "can_round", lambda: False)
    pack_linears(nn.Sequential(nn.Linear(8, 8)), may_round=True)
    assert tried == [{*EXACT, "rounded"}, set(EXACT), set(EXACT)]
    assert {*EXACT, "rounded", "mkl"} == set(KERNELS)


@pytest.mark.parametrize("wrong_rows", [1, 8, 33])
def test_a_kernel_with_another_product_is_left_out(monkeypatch, wrong_rows):
    def wrong(x, weight, bias):
        product = linear.multiply_packed(x, weight, bias)
        return product * 1.001 if len(x) == wrong_rows else product

    monkeypatch.setitem(KERNELS, "packed", wrong)
    with pytest.warns(UserWarning, match="'packed' computes another product"):
        seconds = linear.measure_kernels([torch.randn(8, 16), torch.randn(16, 8)])
    assert all(set(by_kernel) == set(EXACT) - {"packed"} for by_kernel in seconds.values())


def test_mkl_is_tried_exactly_where_torch_has_it(monkeypatch):
    assert linear.has_mkl() == ("mkl" in EXACT) == torch.backends.mkl.is_available()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not linear.has_mkl()


def test_measuring_covers_every_shape_kernel_and_row_count():
    weights = [torch.randn(8, 16), torch.randn(16, 8), torch.randn(8, 16)]
    seconds = linear.measure_kernels(weights)
    assert seconds.keys() == {(8, 16), (16, 8)}
    for by_kernel in seconds.values():
        assert set(by_kernel) == set(EXACT)
        assert all(len(times) == len(linear.MEASURED_ROWS) and min(times) > 0 for times in by_kernel.values())


def test_samples_stop_at_the_limit_but_leave_no_shape_out(monkeypatch):
    monkeypatch.setattr(linear, "SAMPLE_BYTES", 2 * 8 * 16 * 4)
    layers = [nn.Linear(16, 8) for _ in range(5)] + [nn.Linear(8, 100)]
    assert [tuple(weight.shape) for weight in linear.sample_weights(layers)] == [(8, 16), (8, 16), (100, 8)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", [name for name in EXACT if name in FORM_PLANS])
def test_packing_leaves_the_model_the_same_function(tied, form, monkeypatch):
    monkeypatch.setattr(linear, "choose_plan", lambda seconds: FORM_PLANS[form])
    model = tiny_model("llama", tie_word_embeddings=tied)
    ids = torch.randint(0, 100, (2, 7))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        embeddings = model.get_input_embeddings().weight.clone()
        num_linears = sum(type(module) is nn.Linear for module in model.modules())
        report = pack_linears(model)
        torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-4, rtol=1e-4)
    assert report.num_layers == num_linears == sum(isinstance(m, FastLinear) for m in model.modules())
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    assert set(report.summary()) == {f"{out}x{inner}" for out, inner in report.plans}


def test_a_packed_weight_replaces_the_original():
    layer = nn.Linear(64, 32)
    model = nn.Sequential(layer)
    kept = layer.weight
    pack_linears(model)
    assert all(parameter is not kept for parameter in model.parameters())
    assert sum(buffer.numel() for buffer in model.state_dict().values()) == 0


def test_other_dtypes_and_devices_are_left_alone():
    for model in (nn.Sequential(nn.Linear(8, 8).bfloat16()), nn.Sequential(nn.Linear(8, 8, device="meta"))):
        report = pack_linears(model)
        assert type(model[0]) is nn.Linear and (report.num_layers, report.plans) == (0, {})
