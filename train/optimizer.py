"""What steps the heads: gradients come as sums over this process's labels, and leave as one global, clipped mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_


class RunOptimizer(Protocol):
    """Calls that exchange tensors must be made by all processes: all but `param_groups`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def take_gradients(self, num_labels: float) -> float:
        """Sum the gradients over processes, divide by the labels of all. Returns their norm, before it is clipped."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """As of the torch optimizer with whole tensors; what is partitioned is gathered for the main process only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Whole tensors, the same on every process; the parameters must have been loaded before."""


class ReplicatedOptimizer:
    """The whole optimizer on every process."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float, reduce: Callable[[Tensor], Tensor]
    ) -> None:
        self.optimizer, self.max_grad_norm, self.reduce = optimizer, max_grad_norm, reduce

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def take_gradients(self, num_labels: float) -> float:
        parameters = parameters_of(self.optimizer)
        for parameter in parameters:
            assert parameter.grad is not None
            self.reduce(parameter.grad).div_(num_labels)
        return clip_grad_norm_(parameters, self.max_grad_norm).item()

    def step(self) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """In the order in which `state_dict` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
