"""The adapter around a stock model: attention without copies, refusals, and what is told about a model."""

from __future__ import annotations

import pytest
import torch

from medusa.attention import TREE_ATTENTION, slow_tree_attention, tree_attention
from medusa.base_model import adapt_base_model, as_device, as_dtype, load_base_model
from tiny_models import FAMILIES, WINDOW, save_tiny_base, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat


def adapt(model):
    return adapt_base_model(model, tiny_tokenizer(), name="tiny")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_attention_is_the_slow_one(groups):
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 4 // groups, 9, 8), torch.randn(2, 4 // groups, 9, 8)
    visible = torch.rand(2, 5, 9) > 0.4
    visible[:, :, 0] = True
    mask = torch.zeros(2, 1, 5, 9).masked_fill(~visible[:, None], torch.finfo(torch.float32).min)
    for given in (mask.repeat(1, 1, groups, 1), mask):  # as the adapter lays it out, and as any other caller would
        got, _ = tree_attention(torch.nn.Module(), query, key, value, given, scaling=0.3)
        torch.testing.assert_close(got, slow_tree_attention(query, key, value, visible, 0.3), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_probe_and_is_frozen(family):
    base = adapt(tiny_model(family))
    assert all(not parameter.requires_grad for parameter in base.model.parameters()) and not base.model.training
    capped = family == "gemma2"  # there it depends on the release which attention is the stock one's
    assert base.config._attn_implementation in ((TREE_ATTENTION, "eager") if capped else (TREE_ATTENTION,))
    assert base.window == (WINDOW if FAMILIES[family][1].get("sliding_window") else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_lead_to_the_stock_models_logits(family):
    base, stock = adapt(tiny_model(family)), tiny_model(family)
    ids = torch.randint(3, 100, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    logits = base.logits(base.hidden_states(ids, mask))
    with torch.no_grad():
        expected = stock(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert (logits - expected)[mask.bool()].abs().max() < 1e-4


def test_a_family_whose_logits_would_differ_is_refused():
    """What the lm_head's output goes through afterwards is not known to us: better no answer than another one."""
    model = tiny_model("llama")
    forward = type(model).forward

    class Scaled(type(model)):
        def forward(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    model.__class__ = Scaled
    with pytest.raises(ValueError, match="Scaled.*differ from its own forward .* not supported"):
        adapt(model)


def test_layers_whose_state_cannot_be_rolled_back_are_refused():
    model = tiny_model("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="layers of kind linear_attention, whose state cannot be rolled back"):
        adapt(model)


def test_all_ending_tokens_are_known():
    model = tiny_model("llama")
    assert adapt(model).eos_token_ids == {2}  # the config's
    model.generation_config.eos_token_id = [7, 9]
    assert adapt(model).eos_token_ids == {7, 9}
    model.generation_config.eos_token_id = 11
    assert adapt(model).eos_token_ids == {11}


def test_names_that_lead_nowhere_say_so(tmp_path):
    with pytest.raises(ValueError, match="no local directory of that name, nor a Hub model"):
        load_base_model("nobody/nothing-at-all")
    with pytest.raises(ValueError, match="cannot be loaded .a local directory."):
        load_base_model(str(tmp_path))
    with pytest.raises(ValueError, match="dtype 'float12' is unknown; expected one of float32"):
        as_dtype("float12")
    with pytest.raises(ValueError, match="device 'toaster' is unknown"):
        as_device("toaster")
    assert as_dtype("bfloat16") is as_dtype(torch.bfloat16) and as_device("cpu") == torch.device("cpu")


def test_a_directory_loads_in_any_dtype(tmp_path):
    folder = save_tiny_base(tmp_path)
    for dtype in ("float32", "bfloat16"):
        base = load_base_model(str(folder), dtype=dtype)
        assert base.dtype == as_dtype(dtype) and (base.hidden_size, base.vocab_size) == (32, 128)
        assert base.max_positions == 256 and base.name == str(folder)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_states_hold_the_outputs_of_fused_layers(family):
    base = adapt_base_model(tiny_model(family), None, name="tiny")
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = base.model.base_model(input_ids=ids, output_hidden_states=True).hidden_states
    base.fuse_layers((1,))
    states = base.hidden_states(ids, torch.ones_like(ids))
    size = base.hidden_size
    assert states.shape[-1] == base.state_size == 2 * size
    torch.testing.assert_close(states[..., :size], expected[-1])
    torch.testing.assert_close(states[..., size:], expected[1])
    positions, mask = torch.arange(4)[None], torch.ones(4, 4, dtype=torch.bool).tril()
    cached = base.forward(ids, positions, mask, base.new_cache(1, 4), slice(0, 1))
    torch.testing.assert_close(cached, states, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(base.logits(states), base.logits(states[..., :size]))


@pytest.mark.parametrize("layers", [(0,), (1, 9)])
def test_layers_that_the_base_has_not_are_refused(layers):
    base = adapt_base_model(tiny_model("llama"), None, name="tiny")
    with pytest.raises(ValueError, match=f"got layer {layers[-1]} of the base model 'tiny', expected 1 to"):
        base.fuse_layers(layers)
