"""Which batches a step works on and at which learning rate: pure functions of the step, so that resuming needs none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .batching import batch_order
from .config import JointConfig, OptimConfig, TrainConfig
from .mixture import Mixture


@dataclass
class StepPlan:
    """`mixture`: the examples of each epoch. `lengths`: int64 [N], tokens of all examples of the data; None shuffles
    plainly. `world_size`: processes."""

    mixture: Mixture
    lengths: np.ndarray | None
    optim: OptimConfig
    seed: int
    world_size: int
    _epochs: dict[int, list[list[list[int]]]] = field(default_factory=dict, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        batches = math.ceil(self.mixture.num_per_epoch / (self.optim.batch_size * self.world_size))
        return math.ceil(batches / self.optim.gradient_accumulation)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.optim.epochs
        return min(steps, self.optim.max_steps or steps)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batches(self, step: int) -> list[list[int]]:
        """The global micro-batches of a step (0-based): `gradient_accumulation` lists of example indices."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch not in self._epochs:
            self._epochs = {epoch: self._steps_of(epoch)}
        return self._epochs[epoch][place]

    def _steps_of(self, epoch: int) -> list[list[list[int]]]:
        size = self.optim.batch_size * self.world_size
        examples = self.mixture.epoch(epoch)
        lengths = None if self.lengths is None else self.lengths[examples]
        batches = [examples[batch].tolist() for batch in batch_order(len(examples), lengths, size, self.seed, epoch)]
        group = self.optim.gradient_accumulation
        return [batches[i : i + group] for i in range(0, len(batches), group)]


def ramp(joint: JointConfig, progress: float) -> float:
    """What the heads' pull on the base is multiplied by: 0 in Medusa-1 and while the heads are trained alone, then up
    to 1 as a quarter of a sine. `progress`: share of the run that is done, 0 to 1."""
    if joint.rank is None or progress < joint.start:
        return 0.0
    return math.sin(0.5 * math.pi * min(1.0, (progress - joint.start) / joint.warmup))


def learning_rates(config: TrainConfig, progress: float) -> dict[str, float]:
    """Of the heads and, in Medusa-2, of the adapter, which starts softly when its training does."""
    rate = learning_rate(config.optim, progress)
    if config.joint.rank is None:
        return {"heads": rate}
    return {"heads": rate, "adapter": rate * ramp(config.joint, progress) / config.joint.head_lr_multiple}


def learning_rate(optim: OptimConfig, progress: float) -> float:
    """`progress`: share of the run that is done, 0 to 1. Rises linearly over `warmup_ratio`, then by the schedule."""
    if progress < optim.warmup_ratio:
        return optim.lr * progress / optim.warmup_ratio
    if optim.schedule == "constant":
        return optim.lr
    return optim.lr * 0.5 * (1 + math.cos(math.pi * (progress - optim.warmup_ratio) / (1 - optim.warmup_ratio)))
