"""A known temperature is found again; what has no label is left out."""

from __future__ import annotations

import pytest
import torch

from medusa.temperature import ENOUGH, TemperatureFit


@pytest.mark.parametrize("temperature", [0.5, 0.93, 1.0, 1.7, 3.0])
def test_a_known_temperature_is_recovered(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ENOUGH, 50, generator=generator) * 2
    targets = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
    fit = TemperatureFit()
    for start in range(0, ENOUGH, 500):
        fit.update(logits[start : start + 500], targets[start : start + 500])
    assert fit.temperature == pytest.approx(temperature, rel=0.06)
    losses = {
        t: torch.nn.functional.cross_entropy(logits.double() / t, targets).item()
        for t in (fit.temperature, 0.97 * fit.temperature, 1.03 * fit.temperature)
    }
    assert min(losses, key=losses.__getitem__) == fit.temperature


def test_positions_without_a_label_do_not_count():
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    fit, other = TemperatureFit(), TemperatureFit()
    fit.update(logits, torch.tensor([0, -1, 1]))
    other.update(logits[[0, 2]], torch.tensor([0, 1]))
    assert fit.temperature == other.temperature and fit.num_positions == 2


def test_nothing_is_known_without_text_and_no_more_is_read_than_needed():
    fit = TemperatureFit()
    assert fit.temperature == 1.0
    fit.update(torch.randn(ENOUGH + 10, 3), torch.zeros(ENOUGH + 10, dtype=torch.int64))
    assert fit.num_positions == ENOUGH
    fit.update(torch.randn(10, 3), torch.zeros(10, dtype=torch.int64))
    assert fit.num_positions == ENOUGH


def test_extremes_stay_finite():
    fit = TemperatureFit()
    fit.update(torch.tensor([[100.0, 0.0]]).repeat(4, 1), torch.zeros(4, dtype=torch.int64))
    assert 0.2 < fit.temperature < 0.3
