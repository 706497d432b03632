"""The drafter for vLLM without vLLM: a stand-in for its engine, which hands over what vLLM's own does and no more."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from interop_layouts import NUM_HEADS, write_heads
from medusa.base_model import load_base_model
from medusa.checkpoint import load_heads
from medusa.heads_drafter import StaticTreeDrafter
from medusa.interop.vllm import MedusaProposer
from medusa.tree import DraftTree
from tiny_models import save_tiny_base

MAX_LENGTH = 96


def settings(base, heads, num_tokens=NUM_HEADS, **additional):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        model_config=SimpleNamespace(model=base.name, max_model_len=MAX_LENGTH, dtype=torch.float32, revision=None),
        additional_config={"medusa_heads": str(heads)} | additional,
    )


class Target(torch.nn.Module):
    """What vLLM's model is to a drafter: parameters, and hidden states to logits."""

    def __init__(self, base):
        super().__init__()
        self.model = base.model

    def compute_logits(self, hidden_states):
        return self.model.lm_head(hidden_states)


class Engine:
    """Greedy chains of several requests at once. trim(request, draft): what the scheduler leaves of a draft."""

    def __init__(self, base, proposer, prompts, trim=lambda _, draft: draft, chunk=None):
        self.base, self.proposer, self.trim, self.chunk = base, proposer, trim, chunk
        self.target = Target(base)
        proposer.load_model(self.target)
        self.texts = [list(prompt) for prompt in prompts]
        self.num_computed = [0] * len(prompts)
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.drafts = [[] for _ in prompts]
        self.proposed, self.accepted = [], [0] * NUM_HEADS

    @torch.no_grad()
    def hidden(self, tokens):
        return self.base.model.base_model(torch.tensor([tokens])).last_hidden_state[0]

    def step(self, order):
        """One step of the requests in `order`, which is also their order in the batch."""
        verified = {i: self.trim(i, self.drafts[i]) for i in order}
        rows, sampled = [], []
        for i in order:
            if self.chunk and self.num_computed[i] + self.chunk < self.prompt_lengths[i]:
                self.num_computed[i] += self.chunk
                rows.append(self.hidden(self.texts[i][: self.num_computed[i]])[-1:])
                sampled.append(None)
                continue
            self.num_computed[i] = len(self.texts[i])
            rows.append(self.hidden(self.texts[i] + verified[i])[len(self.texts[i]) - 1 :])
            sampled.append(i)
        self.target.compute_logits(torch.randn(sum(map(len, rows)), self.base.hidden_size))  # a step without drafting
        logits = self.target.compute_logits(torch.cat(rows)).split([len(row) for row in rows])
        tokens = [[] if i is None else self.accept(verified[i], part) for i, part in zip(sampled, logits, strict=True)]
        self.target.compute_logits(torch.randn(50, self.base.hidden_size))  # as logprobs of a prompt would
        for i, new in zip(order, tokens, strict=True):
            self.texts[i] += new
        texts = np.zeros((len(order) + 2, MAX_LENGTH + 8), dtype=np.int32)
        for row, i in enumerate(order):
            texts[row, : len(self.texts[i])] = self.texts[i]
        lengths = np.array([len(self.texts[i]) for i in order])
        drafts = self.proposer.propose(tokens, lengths, texts, slot_mappings=None)
        assert len(drafts) == len(order)
        for i, draft in zip(order, drafts, strict=True):
            self.drafts[i] = draft
        self.proposed.append({i: list(draft) for i, draft in zip(order, drafts, strict=True)})

    def accept(self, draft, logits):
        best = logits.argmax(dim=-1).tolist()
        kept = 0
        while kept < len(draft) and draft[kept] == best[kept]:
            self.accepted[kept] += 1
            kept += 1
        return best[: kept + 1]

    def expected(self, i):
        """Our own chain below the request's text."""
        heads = self.proposer.heads
        state, root = self.hidden(self.texts[i][:-1])[-1:], torch.tensor([self.texts[i][-1]])
        return StaticTreeDrafter(heads, DraftTree.chain(NUM_HEADS)).propose(root, state).tokens[0, 1:].tolist()


def prompts(*lengths):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, 99, (length,), generator=generator).tolist() for length in lengths]


def greedy(base, prompt, num_tokens):
    tokens = base.model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
    return tokens[0].tolist()


@pytest.mark.parametrize("layout", [
    {}, {"lm_head": "own"}, {"draft": 64}, {"design": "markov"}, {"design": "hydra", "draft": 64},
])  # fmt: skip
def test_drafts_are_our_own_chain_for_every_design(tmp_path, base, layout):
    proposer = MedusaProposer(settings(base, write_heads(tmp_path / "heads", base, **layout)))
    engine = Engine(base, proposer, prompts(5, 9, 13))
    orders = [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2), (2, 0, 1), (0, 1, 2)]  # rows move and pause
    for order in orders:
        engine.step(order)
        for i in order:
            assert engine.proposed[-1][i] == engine.expected(i)
    assert proposer.num_skipped == 0
    for text, prompt in zip(engine.texts, prompts(5, 9, 13), strict=True):
        assert text == greedy(base, prompt, len(text) - len(prompt))


def test_accepted_tokens_move_the_rows(tmp_path, base):
    """Drafts are exchanged for ones of which 0 to 3 tokens are right: a drafter knows only how many it proposed."""
    calls = []

    def exchange(i, draft):
        calls.append(i)
        right = greedy(base, engine.texts[i], NUM_HEADS)[len(engine.texts[i]) :]
        kept = len(calls) % (NUM_HEADS + 1)
        return [*right[:kept], *((token + 1) % 128 for token in right[kept:])][: len(draft)]

    proposer = MedusaProposer(settings(base, write_heads(tmp_path / "heads", base, design="hydra")))
    engine = Engine(base, proposer, prompts(6, 8, 7), exchange)
    for _ in range(7):
        engine.step((0, 2, 1))
        for i in (0, 1, 2):
            assert engine.proposed[-1][i] == engine.expected(i)
    assert all(engine.accepted) and proposer.num_skipped == 0


def test_trimmed_drafts_cost_one_step_and_no_token(tmp_path, base):
    calls = []

    def trim(i, draft):
        calls.append(i)
        return draft[:1] if len(calls) in (4, 9) else draft

    proposer = MedusaProposer(settings(base, write_heads(tmp_path / "heads", base)))
    engine = Engine(base, proposer, prompts(5, 9), trim)
    for _ in range(9):
        engine.step((0, 1))
    empty = [step for step, drafts in enumerate(engine.proposed) if not any(drafts.values())]
    assert proposer.num_skipped == len(empty) == 2
    for step, drafts in enumerate(engine.proposed):
        assert all(len(draft) == (0 if step in empty else NUM_HEADS) for draft in drafts.values())
    for text, prompt in zip(engine.texts, prompts(5, 9), strict=True):
        assert text == greedy(base, prompt, len(text) - len(prompt))


def test_prompts_in_chunks_have_rows_but_no_drafts(tmp_path, base):
    proposer = MedusaProposer(settings(base, write_heads(tmp_path / "heads", base)))
    engine = Engine(base, proposer, prompts(4, 30), chunk=8)
    for _ in range(6):
        engine.step((0, 1))
    assert [len(step[1]) for step in engine.proposed] == [0, 0, 0, NUM_HEADS, NUM_HEADS, NUM_HEADS]
    assert all(len(step[0]) == NUM_HEADS for step in engine.proposed) and proposer.num_skipped == 0
    assert engine.proposed[-1][1] == engine.expected(1)


def test_nothing_is_drafted_beyond_the_longest_text(tmp_path, base):
    proposer = MedusaProposer(settings(base, write_heads(tmp_path / "heads", base)))
    engine = Engine(base, proposer, prompts(MAX_LENGTH - 4))
    while len(engine.texts[0]) < MAX_LENGTH - 1:
        engine.step((0,))
        assert len(engine.texts[0]) + len(engine.drafts[0]) <= MAX_LENGTH - 1


def test_fewer_tokens_than_heads(tmp_path, base):
    heads = write_heads(tmp_path / "heads", base)
    engine = Engine(base, MedusaProposer(settings(base, heads, num_tokens=2)), prompts(5))
    engine.step((0,))
    assert engine.proposed[0][0] == engine.expected(0)[:2]


def test_what_cannot_be_drafted_is_refused_at_the_start(tmp_path, base, monkeypatch):
    heads = write_heads(tmp_path / "heads", base)
    with pytest.raises(ValueError, match="num_speculative_tokens 4, expected at most the 3 heads"):
        MedusaProposer(settings(base, heads, num_tokens=4))
    fused = write_heads(tmp_path / "fused", base, fused=(1,))
    with pytest.raises(ValueError, match="fused layers .*whose states vLLM does not hand out"):
        MedusaProposer(settings(base, fused))
    bare = settings(base, heads)
    bare.additional_config = None
    with pytest.raises(ValueError, match="got no heads, expected --additional-config"):
        MedusaProposer(bare)
    monkeypatch.setenv("MEDUSA_HEADS", str(heads))
    assert MedusaProposer(bare).heads.config == load_heads(heads)[0].config


def test_another_base_is_warned_of(tmp_path, base):
    proposer = MedusaProposer(settings(base, write_heads(tmp_path / "heads", base)))
    other = load_base_model(str(save_tiny_base(tmp_path / "other", seed=9)))
    proposer.model_config.model = other.name
    with pytest.warns(UserWarning, match="is not, or not known to be"):
        proposer.load_model(Target(other))


def test_a_quantized_base_is_warned_of_but_drafted_for(tmp_path, base):
    from safetensors.torch import load_file, save_file

    proposer = MedusaProposer(settings(base, write_heads(tmp_path / "heads", base)))
    folder = save_tiny_base(tmp_path / "quantized")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name.replace("weight", "qweight")] = tensors.pop(name).to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    proposer.model_config.model = str(folder)
    with pytest.warns(UserWarning, match="is not, or not known to be"):
        proposer.load_model(Target(base))
    assert torch.equal(proposer.heads.lm_head_weight, base.lm_head_weight)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_base_is_recognised_by_its_files(tmp_path, family, tied, recwarn):
    base = load_base_model(str(save_tiny_base(tmp_path / "base", family, tie_word_embeddings=tied)))
    proposer = MedusaProposer(settings(base, write_heads(tmp_path / "heads", base, design="hydra")))
    proposer.load_model(Target(base))
    assert not [warning for warning in recwarn if "not known to be" in str(warning.message)]
    assert torch.equal(proposer.heads.lm_head_weight, base.lm_head_weight)
    assert torch.equal(proposer.heads.embeddings, base.embedding_weight)


def test_nothing_of_vllm_is_imported():
    assert "vllm" not in sys.modules
