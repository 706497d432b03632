"""Heads: what they say untrained, what is theirs and what is the base's, and that no block is shared."""

from __future__ import annotations

import pytest
import torch

from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads

D, V, DRAFT = 16, 40, 12
IDS = torch.arange(0, 36, 3)


def make(lm_head="shared", draft=DRAFT, num_heads=3, num_layers=2):
    config = HeadsConfig(num_heads, num_layers, D, V, lm_head, draft)
    heads = MedusaHeads(config, None if draft is None else IDS)
    weight = torch.randn(V, D)
    heads.init_from_base(weight, weight)
    return heads, weight


def randomise(heads):
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_untrained_heads_say_what_the_base_says(lm_head, draft):
    heads, weight = make(lm_head, draft)
    hidden = torch.randn(2, 5, D)
    base = hidden @ weight.T
    expected = base if draft is None else base[..., IDS]
    logits = heads(hidden)
    assert logits.shape == (3, 2, 5, heads.config.num_draft_tokens)
    for k in range(3):
        torch.testing.assert_close(logits[k], expected)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_forward_is_features_then_projection_head_by_head(lm_head):
    heads, _ = make(lm_head)
    randomise(heads)
    hidden = torch.randn(4, D)
    features = [heads.features(k, hidden, torch.zeros(4, 3)) for k in range(3)]
    x = hidden
    for block in heads.blocks[1]:
        x = x + torch.nn.functional.silu(x @ block.linear.weight.T + block.linear.bias)
    torch.testing.assert_close(features[1], x)
    for k in range(3):
        torch.testing.assert_close(heads(hidden)[k], heads.project(features[k], k))
        torch.testing.assert_close(heads(hidden)[k], features[k] @ heads.projection_weight(k).T)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_every_block_has_weights_of_its_own(lm_head):
    heads, _ = make(lm_head, num_layers=3)
    pointers = {tensor.data_ptr() for tensor in heads.parameters()}
    assert len(pointers) == len(list(heads.parameters())) == 3 * 3 * 2 + (3 if lm_head == "own" else 0)


def test_a_shared_lm_head_is_neither_saved_nor_trained_nor_copied_needlessly():
    heads, weight = make("shared", draft=None)
    assert heads.lm_head_weight.data_ptr() == weight.data_ptr()
    assert not any("projection" in name for name in heads.state_dict())
    assert not any("projection" in name for name, _ in heads.named_parameters())
    assert not heads.lm_head_weight.requires_grad


def test_loaded_own_projections_survive_attaching():
    heads, _ = make("own")
    before = [p.weight.clone() for p in heads.projections]
    heads.attach_base(*[torch.randn(V, D)] * 2)
    assert all(torch.equal(a, b.weight) for a, b in zip(before, heads.projections, strict=True))


def test_draft_ids_map_to_the_base_and_are_saved():
    heads, _ = make()
    assert heads.draft_to_base(torch.tensor([[0, 11], [5, 1]])).tolist() == [[0, 33], [15, 3]]
    assert torch.equal(heads.state_dict()["draft_token_ids"], IDS)
    heads, _ = make(draft=None)
    assert heads.draft_to_base(torch.tensor([7])).tolist() == [7]
    assert "draft_token_ids" not in heads.state_dict()


@pytest.mark.parametrize(
    "ids, message",
    [
        (None, "got no draft token ids"),
        (IDS.int(), r"int32 \[12\]"),
        (IDS[:-1], r"int64 \[11\]"),
        (IDS.flip(0), "out of order"),
        (torch.zeros(12, dtype=torch.int64), "repeated"),
        (IDS + 30, "out of range"),
        (IDS - 3, "out of range"),
    ],
)
def test_wrong_draft_ids_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        MedusaHeads(HeadsConfig(1, 1, D, V, "shared", DRAFT), ids)


def test_wrong_lm_head_and_ids_without_draft_vocabulary_are_refused():
    heads, _ = make()
    with pytest.raises(ValueError, match=r"got a base lm_head of shape \[41, 16\], expected \[40, 16\]"):
        heads.attach_base(*[torch.zeros(V + 1, D)] * 2)
    with pytest.raises(ValueError, match="expected none as draft_vocab_size is null"):
        MedusaHeads(HeadsConfig(1, 1, D, V), IDS)
    with pytest.raises(AssertionError, match="need attach_base"):
        MedusaHeads(HeadsConfig(1, 1, D, V))(torch.zeros(1, D))


def test_packing_keeps_what_heads_say():
    from medusa.linear import FastLinear, pack_linears

    for lm_head in ("own", "shared"):
        heads, _ = make(lm_head)
        randomise(heads)
        hidden = torch.randn(2, D)
        before = heads(hidden)
        pack_linears(heads)
        assert sum(isinstance(m, FastLinear) for m in heads.modules()) == 6 + (3 if lm_head == "own" else 1)
        torch.testing.assert_close(heads(hidden), before)
