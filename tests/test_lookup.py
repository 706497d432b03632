"""What lookup finds, what it believes, and how its branch and the heads' tree become one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.candidates import Candidates
from medusa.draft import NO_TOKEN
from medusa.dynamic_tree import DynamicTreeDrafter
from medusa.lookup import MAX_LENGTH, PRIOR_RATES, LookupDrafter, LookupRow, MatchRates, merge_branch
from medusa.ngram_index import INDEXED_MATCH, MAX_MATCH, MIN_MATCH, Match, NgramIndex
from scripted_heads import ScriptedHeads


def index_of(tokens):
    index = NgramIndex()
    for start in range(0, len(tokens), 3):  # as it grows in steps
        index.extend(tokens[start : start + 3])
    return index


def slow_find(text):
    """text: the root included. The longest run up to INDEXED_MATCH that stood before, most recent first."""
    for length in range(INDEXED_MATCH, MIN_MATCH - 1, -1):
        for end in range(len(text) - 2, length - 1, -1) if length < len(text) else ():
            if text[end - length : end] == text[-length:]:
                total = length
                while total < min(MAX_MATCH, end) and text[end - total - 1] == text[len(text) - total - 1]:
                    total += 1
                return Match(end, total)
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_the_index_finds_what_a_search_finds(text):
    assert index_of(text[:-1]).find(text[-1]) == slow_find(text)


@given(st.lists(st.integers(0, 2), min_size=4, max_size=30), st.integers(1, 40))
def test_what_follows_is_the_text_and_then_itself(text, count):
    index = index_of(text[:-1])
    match = index.find(text[-1])
    if match is None:
        return
    extended = list(text)
    for n in range(count):
        extended.append(extended[match.position + n])
    assert index.follow(match, text[-1], count) == extended[len(text) :]


def test_rates_start_at_the_prior_and_follow_what_happens():
    rates = MatchRates()
    assert rates.rate(2) == PRIOR_RATES[2] and rates.rate(9) == PRIOR_RATES[8]
    assert rates.rate(MAX_MATCH + 5) == PRIOR_RATES[16]
    before = rates.chances(3, MAX_LENGTH)
    assert before[1] == pytest.approx(PRIOR_RATES[3] * PRIOR_RATES[4]), "each right token makes the match longer"
    for _ in range(30):
        rates.count(3, True)
    assert rates.rate(3) > 0.85 and rates.rate(4) == PRIOR_RATES[4]
    for _ in range(30):
        rates.count(3, False)
    assert rates.rate(3) < 0.4, "counts fade"
    for _ in range(200):
        rates.count(2, False)
    assert rates.rate(2) < 0.03 and len(rates.chances(2, MAX_LENGTH)) <= 1


def play(text, *, step=1):
    """Feed a text to a row, `step` tokens at a time; returns the branch of each step."""
    row, branches = LookupRow(), []
    for place in range(0, len(text) - step, step):
        branches.append(row.look_up(text[place]))
        row.index.extend(text[place : place + step])
    return row, branches


@pytest.mark.parametrize("step", [1, 3])
def test_a_text_that_repeats_is_believed_more_and_more(step):
    text = list(range(10, 34)) * 5
    row, branches = play(text, step=step)
    assert all(chances == [] for _, chances in branches[: 24 // step])
    late = branches[-2][1]
    assert len(late) == MAX_LENGTH and late[-1] > 0.5 and late[0] > 0.95
    place = (len(branches) - 2) * step
    assert branches[-2][0] == (text + text)[place + 1 : place + 1 + MAX_LENGTH]


def test_a_text_without_repeats_proposes_nothing():
    _, branches = play(list(range(200)))
    assert all(branch == ([], []) for branch in branches)


def test_pairs_that_lead_nowhere_are_believed_less():
    """The same two tokens come again and again, followed by something else each time."""
    text = [token for n in range(60) for token in (1, 2, 100 + 2 * n, 101 + 2 * n)]
    row, branches = play(text)
    first = next(chances for _, chances in branches if chances)
    last = [chances for _, chances in branches if chances][-1] if row.rates.rate(2) > 0.02 else [0.0]
    assert first[0] == PRIOR_RATES[2] and last[0] < 0.4 * first[0]


def test_nothing_is_learnt_from_what_comes_after_the_first_mistake():
    """There the match has ended: its tokens say nothing of matches of that length."""
    row = LookupRow()
    row.index.extend([1, 2, 3, 4, 5, 6, 7, 1])
    assert row.look_up(2)[0][:2] == [3, 4]
    row.index.extend([2, 3, 9])  # 3 was right; 9 was not; then 5 as had been looked up
    row.look_up(5)
    assert row.rates.rate(2) > PRIOR_RATES[2] and row.rates.rate(3) < PRIOR_RATES[3]
    assert row.rates.rate(4) == PRIOR_RATES[4]


def candidates_of(parent, tokens, probability):
    return Candidates(torch.tensor([tokens]), torch.tensor([parent]), torch.tensor([probability]))


def nodes_of(candidates, row=0):
    paths = [()]
    for token, parent in zip(candidates.tokens[row, 1:].tolist(), candidates.parent[row, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    chances = candidates.probability[row].tolist()
    return {path: round(chance, 4) for path, chance in zip(paths, chances, strict=True) if NO_TOKEN not in path}


TREE = ([-1, 0, 0, 1], [9, 1, 2, 3], [1.0, 0.5, 0.3, 0.2])  # 1 -> 3, and 2


@pytest.mark.parametrize(
    "branch, chances, expected",
    [
        ([4, 5], [0.4, 0.1], {(): 1.0, (1,): 0.5, (4,): 0.4, (2,): 0.3, (1, 3): 0.2, (4, 5): 0.1}),
        ([1, 3, 7], [0.4, 0.35, 0.3], {(): 1.0, (1,): 0.5, (1, 3): 0.35, (2,): 0.3, (1, 3, 7): 0.3}),
        ([1, 8], [0.9, 0.8], {(): 1.0, (1,): 0.9, (1, 8): 0.8, (2,): 0.3, (1, 3): 0.2}),
        ([2], [0.9], {(): 1.0, (2,): 0.9, (1,): 0.5, (1, 3): 0.2}),
        ([3, 1], [0.25, 0.25], {(): 1.0, (1,): 0.5, (2,): 0.3, (3,): 0.25, (3, 1): 0.25, (1, 3): 0.2}),
    ],
)
def test_a_branch_joins_the_tree_where_they_agree(branch, chances, expected):
    merged = merge_branch(candidates_of(*TREE), torch.tensor([branch]), torch.tensor([chances]), 20)
    assert nodes_of(merged) == expected
    draft = merged.draft()
    assert draft.num_drafted.tolist() == [len(expected) - 1]
    for limit in range(1, 7):
        cut = merge_branch(candidates_of(*TREE), torch.tensor([branch]), torch.tensor([chances]), limit)
        assert nodes_of(cut) == dict(list(expected.items())[:limit])


@given(st.data())
def test_merging_is_the_union_of_paths(data):
    """Random heads, random branches, rows with and without one; the higher chance counts; siblings are distinct."""
    heads = ScriptedHeads(3, [2, 4, 6], design="scripted", seed=data.draw(st.integers(0, 1000)))
    inner = DynamicTreeDrafter(heads, 8).candidates(torch.tensor([1, 1, 1]), torch.zeros(3, 4))
    branches = [data.draw(st.lists(st.sampled_from([2, 4, 6, 8]), max_size=5)) for _ in range(3)]
    length = max(map(len, branches))
    if not length:
        return
    chance = [[0.9 * 0.7**n if n < len(branch) else 0.0 for n in range(length)] for branch in branches]
    padded = [branch + [NO_TOKEN] * (length - len(branch)) for branch in branches]
    merged = merge_branch(inner, torch.tensor(padded), torch.tensor(chance), 20)
    for row, branch in enumerate(branches):
        expected = nodes_of(inner, row)
        for n in range(len(branch)):
            path = tuple(branch[: n + 1])
            expected[path] = max(expected.get(path, 0.0), round(chance[row][n], 4))
        assert nodes_of(merged, row) == pytest.approx(expected, abs=1e-3)
        assert sorted(expected.values(), reverse=True) == pytest.approx(
            [p for p in merged.probability[row].tolist() if p > 0], abs=1e-3
        )


def observe(drafter, row, tokens):
    drafter.observe(slice(row, row + 1), torch.tensor([tokens]), torch.tensor([len(tokens)]), torch.zeros(1, 1, 4))


def test_rows_keep_their_own_texts_when_they_move():
    drafter = LookupDrafter()
    observe(drafter, 0, [5, 6, 7, 8, 5])
    observe(drafter, 1, [1, 2, 3, 4, 1])
    two = drafter.propose(torch.tensor([6, 2]), torch.zeros(2, 4))
    assert two.tokens[0, :3].tolist() == [6, 7, 8] and two.tokens[1, :3].tolist() == [2, 3, 4]
    drafter.move_row(1, 0)
    drafter.clear_row(1)
    assert drafter.propose(torch.tensor([2]), torch.zeros(1, 4)).tokens[0, :3].tolist() == [2, 3, 4]
    drafter.clear_row(0)
    assert drafter.propose(torch.tensor([2]), torch.zeros(1, 4)).num_nodes == 1


def test_without_a_match_the_inner_drafter_is_untouched():
    inner = DynamicTreeDrafter(ScriptedHeads(2, [2, 4, 6]), 6)
    drafter = LookupDrafter(inner, max_nodes=6)
    observe(drafter, 0, [50, 51, 52, 53])
    root, hidden = torch.tensor([54]), torch.zeros(1, 4)
    expected, found = inner.propose(root, hidden), drafter.propose(root, hidden)
    assert torch.equal(expected.tokens, found.tokens) and torch.equal(expected.parent, found.parent)
