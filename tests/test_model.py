"""A base, heads and a tree put together from a directory; and the demo model's right values."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch

from medusa import MedusaModel
from medusa.base_model import load_base_model
from medusa.calibration import AcceptanceStatistics, choose_tree
from medusa.checkpoint import BaseReference, HeadsInfo, save_heads
from medusa.config import HeadsConfig
from medusa.fingerprint import fingerprint
from medusa.heads import MedusaHeads
from medusa.infer import generate
from tiny_models import save_tiny_base

pytestmark = pytest.mark.transformers_compat


def calibration(num_heads=2):
    statistics = AcceptanceStatistics(num_heads, 4)
    statistics.update(torch.tensor([[0] * num_heads, [1] * num_heads, [0] + [4] * (num_heads - 1)]))
    return choose_tree(statistics, {1: 1.0, 4: 1.1, 8: 1.2})


@pytest.fixture
def heads_dir(tmp_path, tiny_base_dir):
    base = load_base_model(str(tiny_base_dir))
    heads = MedusaHeads(HeadsConfig(2, 1, base.hidden_size, base.vocab_size))
    heads.init_from_base(base.lm_head_weight, base.embedding_weight)
    with torch.no_grad():
        heads.blocks[1][0].linear.weight.normal_()
    save_heads(tmp_path / "heads", heads, HeadsInfo(BaseReference(str(tiny_base_dir), fingerprint(base.model))))
    calibration().save(tmp_path / "heads" / "tree.json")
    return tmp_path / "heads"


def test_what_was_saved_comes_back(heads_dir, tiny_base_dir, monkeypatch):
    monkeypatch.setattr("medusa.linear.can_round", lambda: False)
    model = MedusaModel.from_pretrained(heads_dir)
    assert model.base.name == str(tiny_base_dir)
    assert model.tree == calibration().tree and model.calibration.tree == model.tree
    unpacked = MedusaModel.from_pretrained(heads_dir, pack=False)
    hidden = torch.randn(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.heads(hidden), unpacked.heads(hidden), atol=1e-4, rtol=1e-4)
    assert not any(parameter.requires_grad for parameter in unpacked.heads.parameters())


def test_packed_or_not_with_heads_or_not_the_answer_is_one(heads_dir):
    answers = set()
    for pack in (True, False):
        model = MedusaModel.from_pretrained(heads_dir, pack=pack)
        for speculate in (True, False):
            [result] = generate(model, "Hello", max_new_tokens=20, speculate=speculate)
            answers.add(tuple(result.token_ids))
    assert len(answers) == 1


def test_another_base_is_refused_and_both_are_named(heads_dir, tiny_base_dir, tmp_path):
    other = save_tiny_base(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=f"got base model '{other}'.*expected.*'{tiny_base_dir}'"):
        MedusaModel.from_pretrained(heads_dir, base=str(other))
    moved = shutil.copytree(tiny_base_dir, tmp_path / "moved")
    assert MedusaModel.from_pretrained(heads_dir, base=str(moved)).base.name == str(moved)


def test_without_a_tree_a_chain_is_drafted_and_a_warning_says_so(heads_dir):
    (heads_dir / "tree.json").unlink()
    with pytest.warns(UserWarning, match="tree.json is missing: drafting a plain chain.*medusa calibrate"):
        model = MedusaModel.from_pretrained(heads_dir)
    assert model.calibration is None and model.tree.to_list() == [[0], [0, 0]]


def test_a_tree_that_does_not_fit_the_heads_is_refused_at_once(heads_dir):
    calibration(num_heads=3).save(heads_dir / "tree.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="has depth 3, but there are 2 heads"):
            MedusaModel.from_pretrained(heads_dir)


@pytest.fixture(scope="module")
def demo_base(demo_model_dir):
    return load_base_model(str(demo_model_dir))


@pytest.mark.slow
def test_the_demo_model_has_its_right_values(demo_base):
    from medusa.drafter import RootDrafter
    from medusa.infer.generation import make_requests, run_requests

    def answer(prompt, **options):
        [request] = make_requests(demo_base, [prompt], **options)
        for _ in run_requests(demo_base, RootDrafter(), [request]):
            pass
        return request.text

    assert answer("What is gravity?", max_new_tokens=40).startswith(
        "Gravity is a fundamental concept in physics that describes the curvature of spacetime caused by the presence "
        "of mass."
    )
    assert answer("The capital of France is", raw=True, max_new_tokens=2) == " Paris."
    text = (
        "In standard autoregressive inference, a model generates one token at a time, and each token requires a full "
        "forward pass before the next can be produced, an inherently sequential process."
    )
    ids = demo_base.tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = demo_base.model(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(3.996, abs=1e-3)
