"""Sampling through the engine: seeds give one text whatever is drafted and whoever is near, and its distribution is the
base's."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, NoRepeatNGramLogitsProcessor

from medusa.base_model import adapt_base_model
from medusa.config import HeadsConfig
from medusa.draft import Draft
from medusa.drafter import Drafter, RootDrafter
from medusa.heads import MedusaHeads
from medusa.infer import generate, stream
from medusa.infer.generation import run_requests
from medusa.infer.request import Request
from medusa.model import MedusaModel
from medusa.sampling import GREEDY_SAMPLING, SamplingParams, Typical
from medusa.tree import DraftTree
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.transformers_compat

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16], [7, 17, 18, 19], [20]]
SAMPLINGS = [
    SamplingParams(0.4, seed=11),
    SamplingParams(0.7, top_p=0.9, seed=12),
    SamplingParams(1.0, top_k=8, repetition_penalty=1.2, seed=13),
    SamplingParams(0.8, min_p=0.05, frequency_penalty=0.4, presence_penalty=0.2, seed=14),
    SamplingParams(1.0, top_p=0.8, seed=15, processors=(NoRepeatNGramLogitsProcessor(2),)),
]


@pytest.fixture(scope="module")
def model():
    base = adapt_base_model(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    heads = MedusaHeads(HeadsConfig(num_heads=3, num_layers=1, hidden_size=32, vocab_size=VOCAB_SIZE))
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    return MedusaModel(base, heads, DraftTree.cartesian([3, 2, 1]))


class LikelyDrafter(Drafter):
    """Guesses after each token what the base finds likeliest after `prompt` and that token, so that some are right; and
    where an answer is known, its next tokens, with mistakes."""

    def __init__(self, base, tree, answers=(), mistakes=0.3, prompt=()):
        self.tree, self.max_nodes, self.mistakes = tree, tree.num_nodes, mistakes
        contexts = torch.tensor([[*prompt, token] for token in range(VOCAB_SIZE)])
        with torch.inference_mode():
            self.guesses = base.model(contexts, use_cache=False).logits[:, -1].argsort(descending=True)
        self.answers, self.generator = answers, torch.Generator().manual_seed(0)

    def propose(self, root, hidden):
        tokens = [root]
        for node in range(1, self.tree.num_nodes):
            tokens.append(self.guesses[tokens[int(self.tree.parent[node])], int(self.tree.rank[node])])
        drafted = torch.stack(tokens, dim=1)
        for row, token in enumerate(root.tolist()):
            self._know(drafted[row], token)
        return Draft.of_tree(self.tree, drafted)

    def _know(self, row, root):
        places = [(answer, n) for answer in self.answers for n, token in enumerate(answer) if token == root]
        if places:
            answer, n = places[int(torch.randint(len(places), (), generator=self.generator))]
            for node, path in enumerate(self.tree.node_paths, start=1):
                lucky = torch.rand((), generator=self.generator) > self.mistakes
                if max(path) == 0 and n + len(path) < len(answer) and lucky:
                    row[node] = answer[n + len(path)]


def make_requests(samplings, length=24):
    return [
        Request(PROMPTS[i % len(PROMPTS)], length + 3 * i, frozenset(), tiny_tokenizer(), sampling=params)
        for i, params in enumerate(samplings)
    ]


def decode(base, drafter, requests, max_rows):
    for _ in run_requests(base, drafter, requests, max_rows=max_rows):
        pass
    return [request.token_ids for request in requests]


def test_a_seed_gives_one_text_with_any_draft_in_any_batch(model):
    """Rows of all settings and a greedy one, which leave at different times, three at once: as each alone."""
    samplings = [*SAMPLINGS[:2], GREEDY_SAMPLING, *SAMPLINGS[2:]]
    alone = [decode(model.base, RootDrafter(), [request], 1)[0] for request in make_requests(samplings)]
    trees = [DraftTree.chain(4), DraftTree.cartesian([3, 2, 1, 1]), DraftTree.root_only()]
    for max_rows, tree in [(1, trees[1]), (3, trees[0]), (3, trees[1]), (5, trees[1]), (5, trees[2])]:
        requests = make_requests(samplings)
        assert decode(model.base, LikelyDrafter(model.base, tree, alone), requests, max_rows) == alone
        if tree.max_depth:
            for request in requests:
                assert sum(request.stats.accepted_by_position) > 0, (request.sampling, request.stats)
    assert len({tuple(answer[:24]) for answer in alone}) == len(alone)


def test_seeds_give_different_texts_and_none_another_every_time(model):
    def answers(seeds):
        options = {"max_new_tokens": 16, "ignore_eos": True}
        samplings = [SamplingParams(seed=seed) for seed in seeds]
        return [result.token_ids for result in generate(model, [[5, 6]] * len(seeds), sampling=samplings, **options)]

    first, second, third = answers([1, 1, 2])
    assert first == second != third
    first, second = answers([None, None])
    assert first != second


@pytest.mark.parametrize("tree", [DraftTree.root_only(), DraftTree.cartesian([3, 2, 1])])
def test_greedy_with_penalty_and_processors_is_stock_generates(model, tree):
    stock = tiny_model("llama")
    for prompt in PROMPTS:
        processors = (NoRepeatNGramLogitsProcessor(2), MinNewTokensLengthLogitsProcessor(len(prompt), 40, 33))
        ids = torch.tensor([prompt])
        expected = stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            repetition_penalty=1.3,
            logits_processor=LogitsProcessorList(processors),
        )[0, len(prompt) :].tolist()
        params = SamplingParams(0.0, repetition_penalty=1.3, processors=processors)
        request = Request(prompt, 40, frozenset(), tiny_tokenizer(), sampling=params)
        assert decode(model.base, LikelyDrafter(model.base, tree, [expected]), [request], 1) == [expected]
        if tree.max_depth:
            assert request.stats.mean_acceptance_length > 1.2


def test_settings_of_the_checkpoint_are_not_applied(model):
    """Chat models often come with a temperature; only what is asked for works."""
    expected = generate(model, [[5, 6]], max_new_tokens=16, ignore_eos=True)[0].token_ids
    model.base.model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    try:
        assert generate(model, [[5, 6]], max_new_tokens=16, ignore_eos=True)[0].token_ids == expected
    finally:
        model.base.model.generation_config.update(do_sample=False, temperature=1.0, repetition_penalty=1.0)


def test_typical_acceptance_keeps_more_and_says_something_else(model):
    """With thresholds of almost nothing every draft is kept, and the text is no longer the base's."""
    options = {"max_new_tokens": 30, "ignore_eos": True, "sampling": SamplingParams(0.7, seed=1)}
    lossless = generate(model, [[5, 6]], **options)[0]
    loose = generate(model, [[5, 6]], **options, acceptance=Typical(1e-9, 1e-9))[0]
    assert loose.stats.mean_acceptance_length > 3 > lossless.stats.mean_acceptance_length
    assert loose.token_ids != lossless.token_ids
    again = generate(model, [[5, 6]], **(options | {"sampling": SamplingParams(0.7, seed=2)}), acceptance=Typical(1e-9))
    assert generate(model, [[5, 6]], **options, acceptance=Typical(1e-9))[0].token_ids == again[0].token_ids


def test_stream_samples_alike(model):
    options = {"max_new_tokens": 20, "ignore_eos": True, "sampling": SamplingParams(0.8, seed=5)}
    pieces = list(stream(model, [5, 6], **options))
    assert [token for piece in pieces for token in piece.token_ids] == generate(model, [[5, 6]], **options)[0].token_ids


def test_settings_for_every_prompt_have_to_be_as_many(model):
    with pytest.raises(ValueError, match="got 1 settings for 2 prompts"):
        generate(model, [[5], [6]], sampling=[SamplingParams()])
    with pytest.raises(ValueError, match="got typical with temperature 0"):
        stream(model, [5], acceptance="typical")


NUM_SEEDS = 2500


def test_two_tokens_come_as_often_as_the_base_says(model):
    """Seeds 0 to 2499 through the engine, drafted with the base's likeliest tokens: the first token comes from the
    prefill, the second out of the tree. Against the exact probabilities of plain forwards, rare pairs put together."""
    params = {"temperature": 0.6, "top_p": 0.95}
    prompt = [5, 6, 7]
    requests = [
        Request(prompt, 3, frozenset(), tiny_tokenizer(), sampling=SamplingParams(**params, seed=seed))
        for seed in range(NUM_SEEDS)
    ]
    drafter = LikelyDrafter(model.base, DraftTree.cartesian([3, 1]), prompt=prompt)
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for first, second, _ in decode(model.base, drafter, requests, 64):
        counts[first, second] += 1
    expected = NUM_SEEDS * exact_pairs(prompt, **params)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    share = torch.cat([expected[common], expected[~common].sum()[None]]).double()
    assert common.sum() >= 10 and chisquare(observed, share / share.sum() * NUM_SEEDS).pvalue > 1e-4
    accepted = sum(sum(request.stats.accepted_by_position) for request in requests)
    assert 0.2 * NUM_SEEDS < accepted < 0.95 * NUM_SEEDS


def exact_pairs(prompt, temperature, top_p):
    """float64 [V, V], nucleus by sorting."""
    contexts = torch.tensor([[*prompt, token] for token in range(VOCAB_SIZE)])
    with torch.no_grad():
        logits = tiny_model("llama")(contexts, use_cache=False).logits.double() / temperature
    probabilities = torch.cat([logits[:1, -2], logits[:, -1]]).softmax(-1)
    best, order = probabilities.sort(descending=True)
    best[best.cumsum(-1) - best >= top_p] = 0
    kept = torch.zeros_like(best).scatter(1, order, best / best.sum(-1, keepdim=True))
    return kept[0, :, None] * kept[1:]
