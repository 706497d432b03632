"""One temperature a head, so that its probabilities mean what they say (Guo et al., 2017, arXiv 1706.04599).

A product of probabilities ranks paths only where each factor is calibrated. Fitted by the likelihood of held-out text:
the loss is summed at fixed temperatures while the text passes by, so that no logits are kept, and its minimum is that
of a parabola through the lowest three.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_STEP = 0.125
LOG_TEMPERATURES = torch.arange(-12, 17, dtype=torch.float64) * LOG_STEP  # 0.22 to 7.4
ENOUGH = 4096  # positions; more would move the temperature by less than a percent


class TemperatureFit:
    """Collects the loss of one head, then `temperature` minimises it. Deterministic."""

    def __init__(self) -> None:
        self.num_positions = 0
        self._losses = torch.zeros(len(LOG_TEMPERATURES), dtype=torch.float64)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits [n, V]; targets int64 [n], -1 where the true token has no logit: left out. Stops after `ENOUGH`."""
        keep = (targets >= 0).nonzero().flatten()[: ENOUGH - self.num_positions]
        if not len(keep):
            return
        logits, targets = logits[keep].float(), targets[keep]
        self.num_positions += len(keep)
        for i, temperature in enumerate(LOG_TEMPERATURES.exp().tolist()):
            scaled = logits / temperature
            own = scaled.gather(1, targets[:, None])[:, 0]
            self._losses[i] += (scaled.logsumexp(dim=1) - own).sum().double().cpu()

    @property
    def temperature(self) -> float:
        """1.0 where nothing was collected."""
        if not self.num_positions:
            return 1.0
        i = int(self._losses.argmin())
        shift = 0.0
        if 0 < i < len(self._losses) - 1:
            left, middle, right = self._losses[i - 1 : i + 2].tolist()
            curvature = left - 2 * middle + right
            shift = 0.5 * (left - right) / curvature if curvature > 0 else 0.0
        return float((LOG_TEMPERATURES[i] + shift * LOG_STEP).exp())
