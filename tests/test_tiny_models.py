"""The test models themselves: deterministic, varied output, every family buildable."""

from __future__ import annotations

import pytest
import torch

from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model, tiny_tokenizer


@pytest.mark.transformers_compat
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_varied_tokens(family: str) -> None:
    model = tiny_model(family)
    prompt = torch.tensor([[5, 17, 40, 99]])
    output = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, 4:]
    assert len(output) == 24 and len(set(output.tolist())) > 6, output
    assert model.get_output_embeddings().weight.shape == (VOCAB_SIZE, 32)


def test_same_seed_same_weights_and_global_rng_untouched() -> None:
    state = torch.get_rng_state()
    first, second, other = tiny_model(), tiny_model(), tiny_model(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_tokenizer_round_trip_and_template() -> None:
    tokenizer = tiny_tokenizer()
    text = "Hello, world!\n  two  spaces <|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < VOCAB_SIZE and ids[-1] == tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
