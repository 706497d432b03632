"""What the project stands on: a tree's logits are those of plain forwards, and greedy answers are the base's own."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medusa.base_model import adapt_base_model
from medusa.budget import AdaptiveBudget, AdaptiveDrafter
from medusa.config import HeadsConfig
from medusa.draft import Draft
from medusa.drafter import Drafter, RootDrafter
from medusa.dynamic_tree import DynamicTreeDrafter
from medusa.heads import MedusaHeads
from medusa.heads_drafter import StaticTreeDrafter
from medusa.infer.decode import DecodeState, prefill
from medusa.infer.generation import run_requests
from medusa.infer.request import Request
from medusa.infer.ties import first_difference
from medusa.latency_curve import StepLatency
from medusa.lookup import LookupDrafter
from medusa.tree import DraftTree
from tiny_models import FAMILIES, SLIDING_FAMILIES, VOCAB_SIZE, WINDOW, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat

CONTEXTS = {"short": [3, 5], "long": [21, 2]}  # tokens a row; the window is 8


@functools.cache
def base_of(family):
    return adapt_base_model(tiny_model(family), tiny_tokenizer(), name=f"tiny {family}")


@functools.cache
def stock_of(family):
    return tiny_model(family)


def test_some_families_slide_over_contexts_longer_than_their_window():
    assert len(FAMILIES) >= 6 and SLIDING_FAMILIES and max(CONTEXTS["long"]) > 2 * WINDOW


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_logits_are_those_of_each_path_alone(family, context):
    """Two rows of different length, prefilled in chunks; every node against a plain forward of context and path."""
    base, stock = base_of(family), stock_of(family)
    tree = DraftTree.cartesian([3, 2, 1, 2])
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in CONTEXTS[context]]
    state = DecodeState.empty(base, RootDrafter(), max_rows=len(prompts), capacity=64 + tree.num_nodes)
    for row, prompt in enumerate(prompts):
        for start in range(0, len(prompt), 6):
            hidden = prefill(base, state, row, prompt[start : start + 6])
        state.append(torch.tensor([0]), hidden[-1:])
    tokens = torch.randint(3, VOCAB_SIZE, (len(prompts), tree.num_nodes), generator=generator)
    with torch.inference_mode():
        positions = state.cache.lengths[state.rows, None] + tree.depth
        hidden = base.forward(tokens, positions, tree.attention_mask, state.cache, state.rows)
        logits = base.logits(hidden)
    for row, prompt in enumerate(prompts):
        for path in tree.paths:
            nodes = path[path >= 0]
            ids = torch.tensor([prompt + tokens[row, nodes].tolist()])
            with torch.no_grad():
                expected = stock(input_ids=ids, use_cache=False).logits[0, len(prompt) :]
            assert (logits[row, nodes] - expected).abs().max() < 1e-4


class OracleDrafter(Drafter):
    """Drafts what the base is going to say, with mistakes: so that drafts of every depth are accepted and refused."""

    def __init__(self, tree, continuations, generator, mistakes):
        self.tree, self.generator, self.mistakes = tree, generator, mistakes
        self.max_nodes = tree.num_nodes
        self._next = {tuple(prompt): answer for prompt, answer in continuations}

    def watch(self, requests):
        self.requests = requests

    def propose(self, root, hidden):
        rows = []
        for token in root.tolist():
            rows.append(self._draft(token))
        return Draft.of_tree(self.tree, torch.tensor(rows))

    def _draft(self, root):
        """The tokens after the only place of an answer where `root` comes next, else noise."""
        row = torch.randint(0, VOCAB_SIZE, (self.tree.num_nodes,), generator=self.generator).tolist()
        row[0] = root
        for request in self.requests:
            answer, done = self._next[tuple(request.prompt_ids)], len(request.token_ids)
            if request.finish_reason is None and done and answer[done - 1] == root:
                following = answer[done : done + self.tree.max_depth]
                for node, path in enumerate(self.tree.node_paths, start=1):
                    lucky = torch.rand((), generator=self.generator) > self.mistakes
                    if max(path) == 0 and len(path) <= len(following) and lucky:
                        row[node] = following[len(path) - 1]
        return row


def stock_answer(family, prompt, max_new_tokens):
    ids = torch.tensor([prompt])
    output = stock_of(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def make_requests(prompts, max_new_tokens):
    return [Request(prompt, max_new_tokens, frozenset(), tiny_tokenizer()) for prompt in prompts]


def decode(base, drafter, requests, max_rows):
    for _ in run_requests(base, drafter, requests, max_rows=max_rows):
        pass
    return [request.token_ids for request in requests]


def assert_same_answers(family, prompts, got, expected):
    """Token for token, but for a tie: there the stock model's two best logits are as good as equal."""
    for prompt, tokens, reference in zip(prompts, got, expected, strict=True):
        if tokens == reference:
            continue
        place = first_difference(tokens, reference)
        ids = torch.tensor([prompt + reference[:place]])
        with torch.no_grad():
            best, second = stock_of(family)(input_ids=ids, use_cache=False).logits[0, -1].topk(2).values.tolist()
        assert best - second < 1e-5, f"{tokens} is not {reference}: token {place} differs, logits by {best - second}"


PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=10)
TREES = PATHS.map(lambda paths: DraftTree.from_paths({p[:d] for p in paths for d in range(1, len(p) + 1)}))
PROMPTS = st.lists(st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=24), min_size=1, max_size=5)
FAST = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("family", FAMILIES)
@FAST
@given(tree=TREES, prompts=PROMPTS, max_rows=st.integers(1, 5), seed=st.integers(0, 1000), length=st.integers(1, 14))
def test_greedy_tokens_are_stock_generates(family, tree, prompts, max_rows, seed, length):
    base = base_of(family)
    expected = [stock_answer(family, prompt, length) for prompt in prompts]
    generator = torch.Generator().manual_seed(seed)
    oracle = OracleDrafter(tree, zip(prompts, expected, strict=True), generator, mistakes=0.3)
    requests = make_requests(prompts, length)
    oracle.watch(requests)
    assert_same_answers(family, prompts, decode(base, oracle, requests, max_rows), expected)


@FAST
@given(tree=TREES, prompts=PROMPTS, max_rows=st.integers(1, 5), seed=st.integers(0, 1000))
def test_greedy_tokens_are_stock_generates_whatever_heads_guess(tree, prompts, max_rows, seed):
    base = base_of("llama")
    expected = [stock_answer("llama", prompt, 10) for prompt in prompts]
    drafter = StaticTreeDrafter(random_heads(base, seed), tree)
    assert_same_answers("llama", prompts, decode(base, drafter, make_requests(prompts, 10), max_rows), expected)


def random_heads(base, seed, scale=1.0):
    heads = MedusaHeads(HeadsConfig(num_heads=4, num_layers=1, hidden_size=32, vocab_size=VOCAB_SIZE))
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.blocks.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return heads


CURVE = {1: 1.0, 8: 1.2, 16: 1.5, 32: 2.5}


def adaptive(inner, propose_seconds=0.05):
    return AdaptiveDrafter(inner, AdaptiveBudget(StepLatency(CURVE, propose_seconds)))


DRAFTERS = {
    "dynamic": lambda heads: DynamicTreeDrafter(heads, 12),
    "dynamic, adaptive": lambda heads: adaptive(DynamicTreeDrafter(heads, 16)),
    "dynamic, lookup, adaptive": lambda heads: adaptive(LookupDrafter(DynamicTreeDrafter(heads, 16), max_nodes=16)),
    "dynamic, lookup": lambda heads: LookupDrafter(DynamicTreeDrafter(heads, 12), max_nodes=12),
    "static, lookup": lambda heads: LookupDrafter(StaticTreeDrafter(heads, DraftTree.cartesian([2, 2]))),
    "lookup, adaptive": lambda heads: adaptive(LookupDrafter(), 0.0),
}
# Phrases over and over, so that lookup has branches; the number says which prompts are short and which are long.
REPETITIVE = st.lists(
    st.tuples(st.lists(st.integers(3, 12), min_size=1, max_size=6), st.integers(1, 5)).map(lambda p: p[0] * p[1]),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", DRAFTERS)
@FAST
@given(prompts=REPETITIVE, lengths=st.lists(st.integers(1, 30), min_size=5), max_rows=st.integers(1, 5), data=st.data())
def test_greedy_tokens_are_stock_generates_whatever_drafts(name, prompts, lengths, max_rows, data):
    """Rows join and leave at different times, as answers are of different lengths."""
    base = base_of("llama")
    heads = random_heads(base, data.draw(st.integers(0, 1000)), data.draw(st.sampled_from([0.0, 0.05, 1.0])))
    expected = [stock_answer("llama", prompt, length) for prompt, length in zip(prompts, lengths, strict=False)]
    requests = [make_requests([p], length)[0] for p, length in zip(prompts, lengths, strict=False)]
    assert_same_answers("llama", prompts, decode(base, DRAFTERS[name](heads), requests, max_rows), expected)


def test_lookup_is_accepted_deeply_where_the_answer_repeats():
    """Without attention the next token follows from the last alone, so that greedy answers soon run in a circle."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    base = adapt_base_model(model, tiny_tokenizer(), name="circular")
    [expected] = decode(base, RootDrafter(), make_requests([[5, 6, 7]], 150), 1)
    assert any(expected[-75:] == expected[-75 - p : -p] for p in range(1, 75)), "this answer must repeat"
    for name in ("lookup, adaptive", "dynamic, lookup, adaptive"):
        [request] = make_requests([[5, 6, 7]], 150)
        assert decode(base, DRAFTERS[name](random_heads(base, 0)), [request], 1) == [expected]
        assert len(request.stats.accepted_by_position) > 10, "deeper than four heads"
        assert request.stats.mean_acceptance_length > 3


def test_the_oracle_has_drafts_of_every_depth_accepted_and_refused():
    """Without this, the properties above could hold because nothing is ever accepted."""
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    expected = [stock_answer("llama", prompt, 60) for prompt in prompts]
    oracle = OracleDrafter(DraftTree.chain(4), zip(prompts, expected, strict=True), torch.Generator(), mistakes=0.3)
    requests = make_requests(prompts, 60)
    oracle.watch(requests)
    assert decode(base_of("llama"), oracle, requests, 3) == expected
    kept = [sum(request.stats.accepted_by_position[d] for request in requests) for d in range(4)]
    assert all(earlier > later > 0 for earlier, later in zip(kept, kept[1:], strict=False)), kept
    assert all(request.stats.num_steps > 60 / 5 for request in requests)


def test_a_tie_is_not_any_difference():
    """Answers that part where the logits are far from equal are found."""
    prompts = [[5, 6, 7], [8, 9]]
    expected = [stock_answer("llama", prompt, 10) for prompt in prompts]
    wrong = [expected[0], expected[1][:4] + [expected[1][4] ^ 1] + expected[1][5:]]
    assert_same_answers("llama", prompts, expected, expected)
    with pytest.raises(AssertionError, match="token 4 differs"):
        assert_same_answers("llama", prompts, wrong, expected)
