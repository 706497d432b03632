"""Rejection keeps the base's distribution: shown on a small vocabulary, where the exact one is known, and with wrong
rules that the same test finds out. The base's logits depend on the two tokens before, so paths matter."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa.acceptance import accept_path
from medusa.draft import Draft
from medusa.row_sampler import RowSampler
from medusa.sampling import SamplingParams
from medusa.sampling_rule import SamplingRule, walk
from medusa.tree import DraftTree

V = 5
PROMPT, ROOT = [0, 3, 3], 1
BASE = torch.randn(V, V, V, generator=torch.Generator().manual_seed(0)) * 1.5  # logits after (previous, current)
GUESS = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(n)) for n in range(V)])  # by parent
TREES = {"chain": DraftTree.chain(3), "tree": DraftTree.cartesian([2, 2, 1])}
BATCH, BATCHES = 20_000, 10

SETTINGS = {
    "T 0.7": SamplingParams(0.7),
    "T 1": SamplingParams(1.0),
    "T 1.5": SamplingParams(1.5),
    "top-k": SamplingParams(1.0, top_k=3),
    "top-p": SamplingParams(0.7, top_p=0.8),
    "min-p": SamplingParams(1.5, min_p=0.25),
    "penalties": SamplingParams(1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "everything": SamplingParams(1.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2, frequency_penalty=0.5),
}


def exact(params, context):
    """float64 [V]: the distribution after `context`, by Transformers' own processors."""
    ids, scores = torch.tensor([context]), BASE[context[-2], context[-1]][None].clone()
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in context[len(PROMPT) :]:
        scores[0, token] -= params.frequency_penalty
    for token in set(context[len(PROMPT) :]):
        scores[0, token] -= params.presence_penalty
    stock = [TemperatureLogitsWarper(params.temperature)]
    stock += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    stock += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    stock += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    for processor in stock:
        scores = processor(ids, scores)
    return scores[0].double().softmax(-1)


def exact_pairs(params):
    """float64 [V, V]: of the two tokens after the root."""
    first = exact(params, [*PROMPT, ROOT])
    return torch.stack([first[token] * exact(params, [*PROMPT, ROOT, token]) for token in range(V)])


class StreamSampler(RowSampler):
    """Numbers from one stream for all rows: 200,000 generators take long to make."""

    def __init__(self, params, stream):
        super().__init__(params, PROMPT, [ROOT])
        self.uniform = stream.__next__

    def begin_again(self):
        self.token_ids[:] = [ROOT]


def uniforms(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.rand(1 << 16, generator=generator, dtype=torch.float64).tolist()


def draft_below(tree, root):
    """A parent-conditioned draft: rank r below a token is its r-th guess. root [B]."""
    tokens = [root]
    for node in range(1, tree.num_nodes):
        tokens.append(GUESS[tokens[int(tree.parent[node])], int(tree.rank[node])])
    return Draft.of_tree(tree, torch.stack(tokens, dim=1))


def one_step(rule, samplers, tree):
    """As a decode step: draft, the base's logits at every node, accept, emit."""
    before = torch.tensor([(PROMPT + sampler.token_ids)[-2:] for sampler in samplers])
    draft = draft_below(tree, before[:, 1])
    previous = draft.tokens.gather(1, draft.parent.clamp(min=0))
    previous[:, 0] = before[:, 0]
    accepted = rule.accept(draft, BASE[previous, draft.tokens])
    kept = draft.tokens.gather(1, accepted.nodes)[:, 1:].tolist()
    rows = zip(samplers, kept, accepted.counts.tolist(), accepted.bonus.tolist(), strict=True)
    for sampler, tokens, count, bonus in rows:
        sampler.token_ids += [*tokens[: count - 1], bonus]
    return accepted.counts


@pytest.fixture(autouse=True, scope="module")
def _no_collector():
    """It goes through the 20,000 samplers over and over: more than half of the time."""
    gc.disable()
    yield
    gc.enable()


@dataclass
class Drawn:
    """pairs: int64 [V, V], how often two tokens followed the root. passed: share of steps with a draft accepted."""

    pairs: torch.Tensor
    passed: float

    def p_values(self, params):
        """Of the first token, and of the first two."""
        expected = exact_pairs(params)
        return p_value(self.pairs.sum(1), expected.sum(1)), p_value(self.pairs.flatten(), expected.flatten())


def p_value(counts, expected):
    possible = expected > 0
    assert counts[~possible].sum() == 0, "tokens that cannot come"
    share = expected[possible] / expected[possible].sum()
    return float(chisquare(counts[possible], share * counts.sum()).pvalue)


def draw_pairs(params, tree, make_rule=SamplingRule, seed=1, batches=BATCHES):
    pairs, passed, stream = torch.zeros(V * V, dtype=torch.int64), 0, uniforms(seed)
    samplers = [StreamSampler(params, stream) for _ in range(BATCH)]
    for _ in range(batches):
        for sampler in samplers:
            sampler.begin_again()
        passed += int((one_step(make_rule(samplers), samplers, tree) > 1).sum())
        short = [sampler for sampler in samplers if len(sampler.token_ids) < 3]
        one_step(make_rule(short), short, tree)
        tokens = torch.tensor([sampler.token_ids[1:3] for sampler in samplers])
        pairs += torch.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V)
    return Drawn(pairs.view(V, V), passed / (BATCH * batches))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", SETTINGS)
def test_two_tokens_come_as_often_as_the_base_says(name, tree):
    params = SETTINGS[name]
    drawn = draw_pairs(params, TREES[tree])
    assert drawn.pairs.sum() == 200_000
    first, both = drawn.p_values(params)
    assert first > 1e-4 and both > 1e-4, (first, both)


@pytest.mark.parametrize("tree", TREES)
def test_a_node_is_passed_with_the_mass_of_its_children(tree):
    params = SamplingParams(1.0)
    drawn = draw_pairs(params, TREES[tree], batches=2)
    mass = exact(params, [*PROMPT, ROOT])[GUESS[ROOT, : TREES[tree].max_width]].sum()
    assert 0.05 < mass < 0.95 and abs(drawn.passed - mass) < 5 * (0.25 / (2 * BATCH)) ** 0.5


class DrawsAnew(SamplingRule):
    """WRONG: where all children are refused, the token comes from the whole distribution, these included."""

    def accept(self, draft, logits):
        choose = self._choose(self._node_scores(draft, logits))
        rows = torch.arange(len(draft.tokens))
        last, _ = walk(draft, rows, choose)
        return accept_path(draft, last, choose(rows, last))


class ResidualNotNormalised(SamplingRule):
    """WRONG: the residual, which sums to less than 1, is inverted with a number from [0, 1); the last token gains."""

    def accept(self, draft, logits):
        scores = self._node_scores(draft, logits)
        rows = torch.arange(len(draft.tokens))
        last, bonus = walk(draft, rows, self._choose(scores))
        residual = scores(rows, last).double().softmax(-1)
        is_child = draft.parent == last[:, None]
        residual[rows[:, None].expand_as(is_child)[is_child], draft.tokens[is_child]] = 0
        number = torch.tensor([self.samplers.samplers[row].uniform() for row in rows.tolist()], dtype=torch.float64)
        return accept_path(draft, last, (residual.cumsum(1) > number[:, None]).int().argmax(1))


class DrawsForEveryPath(SamplingRule):
    """WRONG: every drafted path has a draw of its own at nodes that paths share, so guesses get several chances."""

    def accept(self, draft, logits):
        choose = self._choose(self._node_scores(draft, logits))
        results = [walk(draft, torch.arange(len(draft.tokens)), choose) for _ in range(4)]
        lasts, bonuses = (torch.stack(part) for part in zip(*results, strict=True))
        best = draft.depth.T.gather(0, lasts).argmax(dim=0, keepdim=True)
        return accept_path(draft, lasts.gather(0, best)[0], bonuses.gather(0, best)[0])


class ForgetsThePath(SamplingRule):
    """WRONG: penalties see what was emitted, not what was drafted on the way to the node."""

    def _node_scores(self, draft, logits):
        return lambda rows, nodes: self.samplers.scores(rows, nodes, logits[rows, nodes], lambda row, node: [])


WRONG = {
    "draws anew": (DrawsAnew, "T 1"),
    "residual not normalised": (ResidualNotNormalised, "T 1"),
    "draws for every path": (DrawsForEveryPath, "T 0.7"),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found_out(name, tree):
    make_rule, setting = WRONG[name]
    first, both = draw_pairs(SETTINGS[setting], TREES[tree], make_rule, batches=3).p_values(SETTINGS[setting])
    assert first < 1e-10 and both < 1e-10, (first, both)


@pytest.mark.parametrize("tree", TREES)
def test_a_rule_whose_second_token_is_wrong_is_found_out_by_pairs_only(tree):
    params = SETTINGS["penalties"]
    first, both = draw_pairs(params, TREES[tree], ForgetsThePath, batches=5).p_values(params)
    assert first > 1e-4 and both < 1e-10, (first, both)


def test_another_temperature_is_found_out():
    drawn = draw_pairs(SamplingParams(1.05), TREES["tree"])
    assert max(drawn.p_values(SamplingParams(1.0))) < 1e-10
