"""`model.generate(custom_generate=DIR, trust_remote_code=True)`: Transformers' own tokens; the model left alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from interop_layouts import write_heads
from medusa.base_model import load_base_model
from medusa.interop.export import export_heads
from tiny_models import save_tiny_base

pytestmark = pytest.mark.transformers_compat
NEW = 24


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_base_dir):
    folder = tmp_path_factory.mktemp("hf")
    base = load_base_model(str(tiny_base_dir))
    heads = write_heads(folder / "heads", base, design="hydra", fused=(1,), draft=64)
    return str(export_heads(heads, "hf", folder / "out").folder)


@pytest.fixture(scope="module")
def model(tiny_base_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_base_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_base_dir):
    return AutoTokenizer.from_pretrained(tiny_base_dir)


@pytest.fixture
def fast(model, exported):
    def generate(inputs=None, **options):
        return model.generate(inputs, custom_generate=exported, trust_remote_code=True, **options)

    return generate


def prompt(seed=0, length=9):
    return torch.randint(5, 99, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [
    {}, {"repetition_penalty": 1.3}, {"eos_token_id": [40, 41, 42]}, {"max_new_tokens": None, "max_length": 20},
])  # fmt: skip
def test_greedy_tokens_are_transformers_own(model, fast, options):
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    for seed in range(3):
        assert torch.equal(fast(prompt(seed), **options), model.generate(prompt(seed), **options))


def test_twenty_new_tokens_where_nobody_says(model, fast):
    assert fast(prompt()).shape == model.generate(prompt(), do_sample=False).shape


def test_padded_batches(model, fast):
    rows = [prompt(1, 4), prompt(2, 9)]
    ids = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.int64), rows[0]], dim=1), rows[1]])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(fast(**given), model.generate(**given))


def test_a_batch_that_ends_at_different_times_is_padded(model, fast):
    ids = torch.cat([prompt(seed) for seed in range(4)])
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    eos = int(plain[0, -3])
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    assert torch.equal(fast(ids, **given), model.generate(ids, **given))


def test_sampling_follows_torchs_seed(fast):
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5, "top_k": 20, "num_return_sequences": 3}
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append(fast(prompt(), **options))
    assert torch.equal(*drawn) and drawn[0].shape == (3, 9 + NEW)
    assert len({tuple(row) for row in drawn[0].tolist()}) == 3


def test_processors_streamers_stop_strings_and_output_objects(model, fast, tokenizer):
    from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

    plain = model.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor([int(plain[0, 10])])])
    given = {"max_new_tokens": NEW, "do_sample": False}
    suppressed = fast(prompt(), logits_processor=processors, **given)
    assert torch.equal(suppressed, model.generate(prompt(), logits_processor=processors, **given))

    class Streamer:
        taken: list[int] = []
        ended = False

        def put(self, value):
            self.taken += value.reshape(-1).tolist()

        def end(self):
            self.ended = True

    streamer = Streamer()
    assert streamer.taken == [] and torch.equal(fast(prompt(), streamer=streamer, **given), plain)
    assert streamer.taken == plain[0].tolist() and streamer.ended
    output = fast(prompt(), return_dict_in_generate=True, **given)
    assert torch.equal(output.sequences, plain)
    stop = tokenizer.decode(plain[0, 14:16])
    stopped = fast(prompt(), stop_strings=[stop], tokenizer=tokenizer, **given)
    assert torch.equal(stopped, model.generate(prompt(), stop_strings=[stop], tokenizer=tokenizer, **given))


def test_the_model_is_left_as_it_was(tiny_base_dir, exported):
    model = AutoModelForCausalLM.from_pretrained(tiny_base_dir, dtype=torch.float32)
    given = {"custom_generate": exported, "trust_remote_code": True, "max_new_tokens": 4}
    before = model.config._attn_implementation, model.training, [p.requires_grad for p in model.parameters()]
    assert before[0] == "sdpa" and any(before[2])
    model.train()
    model.generate(prompt(), **given)
    assert model.training
    model.eval()
    after = model.config._attn_implementation, model.training, [p.requires_grad for p in model.parameters()]
    assert after == before


@pytest.mark.parametrize("options, message", [
    ({"num_beams": 2}, "got num_beams=2, which decoding with heads has no equivalent for"),
    ({"stopping_criteria": [lambda *_, **__: False]}, "got stopping_criteria"),
    ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "got prefix_allowed_tokens_fn"),
    ({"no_repeat_ngram_size": 2}, "got no_repeat_ngram_size=2"),
    ({"stop_strings": ["a"]}, "got stop_strings without a tokenizer"),
    ({"output_scores": True}, "got output_scores=True"),
    ({"max_new_tokens": 9999}, "more than the 256 of the model's context"),
])  # fmt: skip
def test_what_has_no_equivalent_is_refused(fast, options, message):
    with pytest.raises(ValueError, match=message):
        fast(prompt(), **({"max_new_tokens": 4} | options))


def test_another_base_and_missing_trust_are_refused(tmp_path, exported):
    folder = save_tiny_base(tmp_path / "other", seed=5)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(ValueError, match="which the heads were trained on"):
        other.generate(prompt(), custom_generate=exported, trust_remote_code=True, max_new_tokens=4)
    with pytest.raises(ValueError, match="trust_remote_code"):
        other.generate(prompt(), custom_generate=exported, trust_remote_code=False, max_new_tokens=4)


def test_heads_may_lie_elsewhere(model, exported, tmp_path):
    import shutil

    moved = shutil.copytree(exported, tmp_path / "moved")
    given = {"max_new_tokens": 6, "do_sample": False, "custom_generate": exported, "trust_remote_code": True}
    assert torch.equal(model.generate(prompt(), heads=str(moved), **given), model.generate(prompt(), **given))
    with pytest.raises(ValueError, match="got no heads.safetensors in .*; pass heads=DIR"):
        model.generate(prompt(), heads=str(tmp_path), **given)
