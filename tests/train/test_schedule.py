"""Steps and learning rates as pure functions of the step."""

from __future__ import annotations

import numpy as np
import pytest

from medusa.train.config import OptimConfig
from medusa.train.mixture import Mixture, Part
from medusa.train.schedule import StepPlan, learning_rate


def make_plan(num=23, world_size=1, **optim):
    settings = {"batch_size": 4, "gradient_accumulation": 2, "epochs": 3} | optim
    mixture = Mixture([Part(np.arange(num) * 2, num)], 0)
    return StepPlan(mixture, None, OptimConfig(**settings), 0, world_size)


def test_each_epoch_is_every_example_once():
    plan = make_plan()
    assert (plan.steps_per_epoch, plan.total_steps) == (3, 9)
    for epoch in range(3):
        steps = range(3 * epoch, 3 * epoch + 3)
        assert {plan.epoch(step) for step in steps} == {epoch}
        batches = [batch for step in steps for batch in plan.batches(step)]
        assert sorted(sum(batches, [])) == list(range(0, 46, 2))
        assert [len(plan.batches(step)) for step in steps] == [2, 2, 2]
    assert plan.batches(0) != plan.batches(3)


def test_a_step_does_not_depend_on_those_before_it():
    plan = make_plan()
    order = [plan.batches(step) for step in range(9)]
    assert [make_plan().batches(step) for step in reversed(range(9))] == order[::-1]


def test_only_one_epoch_is_kept():
    plan = make_plan()
    for step in range(9):
        plan.batches(step)
    assert len(plan._epochs) == 1


def test_steps_are_limited_and_shared():
    assert make_plan(max_steps=4).total_steps == 4 and make_plan(max_steps=100).total_steps == 9
    assert make_plan(world_size=2).batches(0)[0] == make_plan(batch_size=8).batches(0)[0]


def test_rate_rises_linearly_and_falls_by_a_cosine():
    optim = OptimConfig(lr=2.0, warmup_ratio=0.2)
    assert learning_rate(optim, 0.1) == pytest.approx(1.0)
    assert learning_rate(optim, 0.2) == pytest.approx(2.0)
    assert learning_rate(optim, 0.6) == pytest.approx(1.0)
    assert learning_rate(optim, 1.0) == pytest.approx(0.0)
    assert learning_rate(OptimConfig(lr=2.0, warmup_ratio=0.0), 0.0) == 2.0
    assert learning_rate(OptimConfig(lr=2.0, schedule="constant"), 0.9) == 2.0
