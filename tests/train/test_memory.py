"""What a training step holds at once: no more with more heads, and how much that is for a large model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa.base_model import adapt_base_model
from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.train.loss import LossSettings, accumulate_gradients, head_weights
from medusa.train.objectives import OBJECTIVES
from medusa.train.targets import Teacher
from memory import PeakMemory

BATCH, LENGTH, CHUNK = 4, 2048, 256
LARGE_D, LARGE_V, LARGE_K = 4096, 128_256, 5
OPTIMIZER_BYTES = 16  # float32 parameter, gradient and two moments


def heads_and_hidden(num_heads, hidden_size, vocab_size):
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(num_heads, 1, hidden_size, vocab_size, "shared", None))
    heads.init_from_base(*[torch.randn(vocab_size, hidden_size)] * 2)
    heads.shared_projection.to(torch.bfloat16)
    for parameter in heads.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return heads, torch.randn(BATCH * LENGTH, hidden_size, dtype=torch.bfloat16)


def peak_of_loss(num_heads, objective="cross_entropy", hidden_size=128, vocab_size=2004):
    """Bytes above the heads, their gradients and the hidden states."""
    heads, hidden = heads_and_hidden(num_heads, hidden_size, vocab_size)
    labels = torch.randint(0, vocab_size, (len(hidden), num_heads))
    prefix = labels.int()
    settings = LossSettings(head_weights(num_heads, 0.8), CHUNK, OBJECTIVES[objective], torch.bfloat16)
    with PeakMemory() as memory:
        teacher = None
        if objective != "cross_entropy":
            base = Teacher(heads.lm_head_weight, None, lambda logits: logits, num_tokens=16)
            rows = torch.arange(len(hidden))[:, None] + torch.arange(1, num_heads + 1)
            teacher = base.targets(hidden, CHUNK), rows.clamp(max=len(hidden) - 1)
        accumulate_gradients(heads, hidden, prefix, labels, settings, teacher)
    return memory.peak


def peak_of_forward(hidden_size, is_padded=False):
    """Bytes at once in a forward of a base with the proportions of Llama 3 8B; depth does not count. Padding brings a
    mask, whose size has nothing to do with the model's."""
    settings = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 64}
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        max_position_embeddings=LENGTH,
        **settings,
    )
    base = adapt_base_model(LlamaForCausalLM(config).to(torch.bfloat16), None, name="tiny")
    ids, mask = torch.zeros(BATCH, LENGTH, dtype=torch.int64), torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, -1] = not is_padded
    with PeakMemory() as memory:
        base.hidden_states(ids, mask)
    return memory.peak


def peak_of_optimizer(hidden_size):
    """Bytes that AdamW's step needs besides its state, as it runs on a GPU."""
    heads, _ = heads_and_hidden(1, hidden_size, 8)
    optimizer = torch.optim.AdamW(heads.parameters(), foreach=True)
    optimizer.step()  # makes the moments
    with PeakMemory() as memory:
        optimizer.step()
    return memory.peak / sum(parameter.numel() for parameter in heads.parameters())


def along(measure, small, large, wanted):
    """`measure` is linear: its value at `wanted`, from those at `small` and `large`."""
    first, second = measure(small), measure(large)
    return first + (second - first) * (wanted - small) / (large - small)


@pytest.mark.parametrize("objective", ["cross_entropy", "lk_hybrid"])
def test_memory_does_not_grow_with_the_number_of_heads(objective):
    one, eight = peak_of_loss(1, objective), peak_of_loss(8, objective)
    assert one <= eight < 1.1 * one  # labels, ranks and prefix are 20 bytes a head and position


def test_the_count_sees_what_grows_with_the_number_of_heads():
    def all_at_once(num_heads):
        heads, hidden = heads_and_hidden(num_heads, 64, 2004)
        with PeakMemory() as memory:
            heads.to(torch.bfloat16)(hidden).float().logsumexp(-1).sum().backward()
        return memory.peak

    assert all_at_once(4) > 3 * all_at_once(1)


def test_a_large_model_needs_less_than_4_gb_above_the_base(capsys):
    """V = 128,256, D = 4096, K = 5, batch 4 x 2048, bfloat16, shared lm_head: counted at small sizes, all linear."""
    num_parameters = LARGE_K * (LARGE_D**2 + LARGE_D)
    state = OPTIMIZER_BYTES * num_parameters
    hidden = 2 * BATCH * LENGTH * LARGE_D
    fixed = peak_of_loss(LARGE_K)
    by_width = along(lambda d: peak_of_loss(LARGE_K, "lk_hybrid", hidden_size=d), 64, 128, LARGE_D) - fixed
    by_vocabulary = along(lambda v: peak_of_loss(LARGE_K, "lk_hybrid", vocab_size=v), 2004, 4008, LARGE_V) - fixed
    phases = {
        "base": along(peak_of_forward, 64, 128, LARGE_D) + peak_of_forward(16, is_padded=True),
        "loss": hidden + fixed + by_width + by_vocabulary,
        "optimizer": peak_of_optimizer(256) * num_parameters,
    }
    with capsys.disabled():
        print(f"\nstate {state / 1e9:.2f} GB; besides " + ", ".join(f"{k} {v / 1e9:.2f} GB" for k, v in phases.items()))
    assert state + max(phases.values()) < 4e9


def test_the_count_is_linear_where_it_is_extrapolated():
    for measure, sizes in (
        (peak_of_forward, (64, 128, 192)),
        (lambda v: peak_of_loss(2, vocab_size=v), (2048, 3072, 4096)),
    ):
        small, middle, large = (measure(size) for size in sizes)
        assert large - middle == pytest.approx(middle - small, rel=0.02)
