"""How many nodes pay on given hardware, and that a row whose drafts fail stops drafting and comes back."""

from __future__ import annotations

import pytest
import torch

from medusa.budget import MAX_PAUSE, AdaptiveBudget, AdaptiveDrafter, BatchPause, RowRecord
from medusa.candidates import CandidateDrafter, Candidates
from medusa.latency_curve import BatchLatency, StepLatency, latency_at

REAL = {1: 0.057, 8: 0.088, 16: 0.102, 32: 0.148}
ONE = torch.ones(1)


def chances(*values):
    return torch.tensor([[1.0, *values]])


def test_the_fastest_number_of_nodes_is_chosen():
    probability = chances(*(0.6 * 0.9**n for n in range(31)))
    choice = AdaptiveBudget(StepLatency(REAL, 0.004)).choose(probability, ONE)
    speeds = {n: float(probability[0, :n].sum()) / (latency_at(REAL, n) + 0.004) for n in range(1, 33)}
    assert choice.num_nodes == max(speeds, key=speeds.__getitem__) and 1 < choice.num_nodes < 32
    assert choice.gain == pytest.approx(speeds[choice.num_nodes] * REAL[1])


def test_what_is_unlikely_is_not_drafted():
    assert AdaptiveBudget(StepLatency(REAL)).choose(chances(*[0.01] * 15), ONE).num_nodes == 1
    assert AdaptiveBudget(StepLatency(REAL)).choose(chances(*[0.9] * 15), ONE).num_nodes == 16
    assert AdaptiveBudget(StepLatency(REAL)).choose(chances(*[0.9] * 15), ONE / 90).num_nodes == 1, (
        "scaled by what rows keep"
    )
    assert AdaptiveBudget(StepLatency({1: 0.05, 2: 0.1, 4: 0.2})).choose(chances(0.9, 0.8, 0.7), ONE).num_nodes == 1


def test_proposing_is_paid_for_already_but_lowers_the_gain():
    budget = AdaptiveBudget(StepLatency({1: 1.0, 2: 1.5}, 1.0))
    choice = budget.choose(chances(0.4), ONE)
    assert choice.num_nodes == 2, "1.4 / 2.5 is more than 1 / 2"
    assert choice.gain == pytest.approx(0.56), "but less than one token a second without"


def test_rows_share_one_number_at_the_cost_of_all_their_tokens():
    curve = {1: 1.0, 2: 1.05, 4: 1.2, 8: 4.0}
    good, bad = [1.0, 0.9, 0.8, 0.7], [1.0, 0.01, 0.01, 0.0]
    budget = AdaptiveBudget(StepLatency(curve))
    assert budget.choose(torch.tensor([good]), torch.ones(1)).num_nodes == 4
    speeds = {n: (sum(good[:n]) + sum(bad[:n])) / latency_at(curve, 2 * n) for n in range(1, 5)}
    choice = budget.choose(torch.tensor([good, bad]), torch.ones(2))
    assert choice.num_nodes == max(speeds, key=speeds.__getitem__) == 2
    assert choice.gain == pytest.approx((1.9 + 1.01) / 2 * 1.05 / 1.2)


def test_latency_beyond_the_curve_goes_on_as_its_end_does():
    assert latency_at(REAL, 12) == pytest.approx(0.095)
    assert latency_at(REAL, 48) == pytest.approx(0.148 + 16 * (0.148 - 0.102) / 16)
    assert latency_at({1: 1.0, 2: 3.0, 4: 2.0}, 8) == 2.0, "a dip at the end is no promise"
    assert latency_at({1: 0.5}, 4) == 2.0


def test_batches_cost_what_was_measured_for_their_number_of_rows():
    by_rows = {4: BatchLatency({1: 2.0, 2: 4.0, 4: 8.0}, 0.5), 16: BatchLatency({1: 8.0, 4: 32.0}, 0.6)}
    latency = StepLatency({1: 1.0, 2: 1.1, 4: 1.2}, 0.1, by_rows)
    assert latency.forward(1, 2) == 1.1 and latency.forward(4, 2) == 4.0 and latency.forward(16, 2) == 16.0
    assert latency.forward(10, 4) == pytest.approx(20.0), "between 4 rows and 16"
    assert latency.forward(28, 1) == pytest.approx(14.0), "beyond the largest"
    assert [latency.propose(rows) for rows in (1, 4, 16)] == [0.1, 0.5, 0.6]
    budget, good = AdaptiveBudget(latency), [1.0, 0.9, 0.8, 0.7]
    assert budget.choose(torch.tensor([good]), ONE).num_nodes == 4
    assert budget.choose(torch.tensor([good] * 16), torch.ones(16)).num_nodes == 1, "one row would draft them all"


class ScriptedDrafter(CandidateDrafter):
    """A chain that promises much; counts how often it is asked."""

    max_nodes = 4

    def __init__(self):
        self.num_asked = 0

    def candidates(self, root, hidden):
        self.num_asked += 1
        batch = len(root)
        tokens = torch.cat([root[:, None], torch.full((batch, 3), 7)], dim=1)
        parent = torch.tensor([-1, 0, 1, 2]).expand(batch, -1)
        return Candidates(tokens, parent, torch.tensor([1.0, 0.8, 0.64, 0.5]).expand(batch, -1))


def run(drafter, steps, accept):
    """Steps of one row that accepts the first `accept` of the nodes drafted; returns N of each step."""
    sizes = []
    for _ in range(steps):
        draft = drafter.propose(torch.tensor([3]), torch.zeros(1, 4))
        count = min(1 + accept, draft.num_nodes)
        drafter.observe(slice(0, 1), draft.tokens[:, :count], torch.tensor([count]), torch.zeros(1, count, 4))
        sizes.append(draft.num_nodes)
    return sizes


def new_drafter():
    return AdaptiveDrafter(ScriptedDrafter(), AdaptiveBudget(StepLatency({1: 1.0, 2: 1.2, 4: 1.4}, 0.05)))


def test_a_row_that_accepts_nothing_shrinks_to_its_root_and_recovers():
    drafter = new_drafter()
    assert set(run(drafter, 5, accept=3)) == {4}
    failing = run(drafter, 200, accept=0)
    late = failing[50:]
    assert failing[0] == 4 and late.count(1) > 0.9 * len(late)
    asked = drafter.inner.num_asked
    run(drafter, 200, accept=0)
    assert drafter.inner.num_asked - asked < 50, "most steps do not even propose"
    recovering = run(drafter, 150, accept=3)
    assert recovering[-50:] == [4] * 50 and drafter.record(0).ratio > 0.9


def test_what_failing_drafts_cost_is_little():
    """Seconds of 400 steps without one accepted draft, against a token a step."""
    drafter = new_drafter()
    run(drafter, 20, accept=0)
    asked = drafter.inner.num_asked
    sizes = run(drafter, 400, accept=0)
    seconds = sum(latency_at(drafter.budget.latency.curve, size) for size in sizes)
    assert seconds + 0.05 * (drafter.inner.num_asked - asked) < 1.03 * 400


def test_rows_are_judged_apart_and_followed():
    drafter = new_drafter()
    for _ in range(8):
        draft = drafter.propose(torch.tensor([3, 4]), torch.zeros(2, 4))
        kept = min(4, draft.num_nodes)
        drafter.observe(slice(0, 2), draft.tokens[:, :kept], torch.tensor([1, kept]), torch.zeros(2, kept, 4))
    assert drafter.record(0).ratio < 0.4 and drafter.record(1).ratio > 1.0
    drafter.move_row(1, 0)
    drafter.clear_row(1)
    assert drafter.record(0).ratio > 1.0 and drafter.record(1).ratio == 1.0


def test_a_batch_that_does_not_pay_is_not_asked_whoever_joins_it():
    """Rows that look good by themselves are no reason, as long as all together would be faster without."""
    by_rows = {2: BatchLatency({1: 1.0, 2: 2.0, 4: 4.0}, 0.5)}
    drafter = AdaptiveDrafter(ScriptedDrafter(), AdaptiveBudget(StepLatency({1: 1.0, 2: 1.1, 4: 1.2}, 0.05, by_rows)))
    for step in range(200):
        draft = drafter.propose(torch.tensor([3, 4]), torch.zeros(2, 4))
        kept = draft.num_nodes
        drafter.observe(slice(0, 2), draft.tokens, torch.tensor([kept, kept]), torch.zeros(2, kept, 4))
        if step % 5 == 0:
            drafter.clear_row(1)
    assert drafter.inner.num_asked < 20
    assert run(drafter, 5, accept=3) == [4] * 5, "alone, it drafts at once"


def test_a_muted_row_counts_as_one_token():
    """Its neighbour drafts as much as its own chances pay for at the cost of both, and it never makes it pause."""
    drafter = new_drafter()
    drafter.mute_row(1)
    assert drafter.record(1).ratio == 0.0
    for _ in range(60):
        draft = drafter.propose(torch.tensor([3, 4]), torch.zeros(2, 4))
        kept = draft.num_nodes
        drafter.observe(slice(0, 2), draft.tokens, torch.tensor([kept, 1]), torch.zeros(2, kept, 4))
        assert kept > 1
    drafter.clear_row(1)
    assert drafter.record(1) == RowRecord()


def test_a_prompt_is_no_draft():
    drafter = new_drafter()
    drafter.observe(slice(0, 1), torch.zeros(1, 9, dtype=torch.int64), torch.tensor([9]), torch.zeros(1, 9, 4))
    assert drafter.record(0) == RowRecord()


def test_pauses_double_up_to_a_limit_and_end_at_once():
    record, pauses = RowRecord(), []
    for _ in range(10):
        record.count_gain(0.9)
        pauses.append(record.pause)
        record.pause = 0
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32, 32, 32] and MAX_PAUSE == 32
    record.count_gain(1.1)
    record.count(0.0, 2.0)
    assert record.pause == 32, "a promise is not enough"
    record.count_gain(1.1)
    record.count(2.0, 2.0)
    record.count_gain(0.9)
    assert record.pause == 0 and record.last_pause == 0


@pytest.mark.parametrize(("num_rows", "little", "enough"), [(2, 1.05, 1.15), (7, 1.05, 1.15), (8, 1.2, 1.3)])
def test_batches_pause_at_once_and_start_again_at_once(num_rows, little, enough):
    pause, pauses = BatchPause(), []
    for _ in range(7):
        pause.count_gain(little, num_rows)
        pauses.append(pause.pause)
    assert pauses == [16, 32, 64, 128, 128, 128, 128], "a little gain is none"
    pause.count_gain(enough, num_rows)
    assert pause == BatchPause()


def test_the_ratio_returns_to_one_while_nothing_is_drafted():
    record = RowRecord()
    for _ in range(20):
        record.count(0.0, 2.0)
    low = record.ratio
    for _ in range(100):
        record.count(0.0, 0.0)
    assert low < 0.15 and record.ratio > 0.6
