"""The same answers on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from medusa.base_model import adapt_base_model
from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.infer import generate
from medusa.infer.latency import LatencyMeter
from medusa.model import MedusaModel
from medusa.tree import DraftTree
from tiny_models import FAMILIES, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def load(family, dtype=torch.float32):
    base = adapt_base_model(tiny_model(family).to(DEVICE, dtype), tiny_tokenizer(), name=family)
    heads = MedusaHeads(HeadsConfig(num_heads=3, num_layers=1, hidden_size=32, vocab_size=128)).to(DEVICE, dtype)
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    return MedusaModel(base, heads, DraftTree.cartesian([4, 3, 2]))


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_answer_as_stock_generate_does(family):
    torch.backends.cuda.matmul.allow_tf32 = False
    model, stock = load(family), tiny_model(family).to(DEVICE)
    prompts = [[5, 6, 7], [8] * 20, [9, 10], [11] * 7]
    results = generate(model, prompts, max_new_tokens=24, ignore_eos=True, max_rows=3)
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt], device=DEVICE)
        expected = stock.generate(ids, max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert result.token_ids == expected.tolist()


def test_half_precision_runs_and_is_measured():
    model = load("llama", torch.bfloat16)
    [result] = generate(model, [[5, 6, 7]], max_new_tokens=24, ignore_eos=True)
    assert len(result.token_ids) == 24
    meter = LatencyMeter(model.base, (1, 8))
    meter.round()
    assert min(meter.curve().values()) > 0
