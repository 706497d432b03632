"""DeepSpeed's part of a run: gradients and optimizer state of the heads partitioned (ZeRO-2), the base too (ZeRO-3).

The heads themselves stay whole on every process, under ZeRO-3 as well: they are what is saved, and cost little beside
their optimizer state. Our loss adds gradients up over heads and micro-batches, some processes without a label for a
head, which DeepSpeed's hooks cannot follow. So gradients are added up on the heads' own parameters, and the engine owns
a second set of parameters in the same memory, which get the finished sums in one backward pass per step.
"""

from __future__ import annotations

from typing import Any, Literal

import deepspeed
import torch
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    logger,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from .optimizer import parameters_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def checked_stage(config: dict[str, Any]) -> Literal["zero2", "zero3"]:
    """Raises ValueError for another stage than 2 or 3, and for offloading."""
    logger.setLevel("WARNING")
    zero = config["zero_optimization"]
    if zero["stage"] not in (2, 3):
        raise ValueError(
            f"launch: got DeepSpeed zero_optimization.stage {zero['stage']}, expected 2 or 3; launch with "
            "configs/accelerate/zero2.yaml or zero3.yaml, or ddp.yaml to partition nothing"
        )
    for name in ("offload_optimizer", "offload_param"):
        if (device := ((zero.get(name) or {}).get("device") or "none")) != "none":
            raise ValueError(
                f"launch: got DeepSpeed zero_optimization.{name}.device {device}, expected none: offloading is not "
                "supported; remove it, and use more processes or configs/accelerate/zero3.yaml to need less memory"
            )
    return "zero2" if zero["stage"] == 2 else "zero3"


class ZeroOptimizer:
    """Steps the parameters of a fresh torch AdamW by a ZeRO-2 engine; see `RunOptimizer`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        config: dict[str, Any],
        rank: int,
        world_size: int,
    ) -> None:
        self.parameters = parameters_of(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [nn.Parameter(parameter.data) for parameter in group["params"]]
        self.engine_parameters = parameters_of(optimizer)
        self.rank, self.world_size = rank, world_size
        self.engine, *_ = deepspeed.initialize(
            model=nn.ParameterList(self.engine_parameters),
            optimizer=optimizer,
            config=_engine_config(config, 2, torch.float32, world_size) | {"gradient_clipping": max_grad_norm},
        )
        self._share_memory()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    def take_gradients(self, num_labels: float) -> float:
        total = torch.zeros((), device=self.parameters[0].device)
        for own, engines in zip(self.parameters, self.engine_parameters, strict=True):
            assert own.grad is not None
            # The engine averages over processes what is to be summed.
            total = total + _GivenGradient.apply(engines, own.grad.mul_(self.world_size / num_labels))
            own.grad = None
        self.engine.backward(total)
        norm = float(self.engine.optimizer.scaled_global_norm())
        return norm if norm >= 0 else float("nan")  # DeepSpeed's sign for no finite number

    def step(self) -> None:
        self.engine.step()
        self._share_memory()

    def state_dict(self) -> dict[str, Any]:
        if not self.engine.optimizer.state:
            return {"state": {}}  # not a single step yet
        self._link_moments()
        states: dict[int, dict[str, Tensor]] = {}
        for index, parameter in enumerate(self.engine_parameters):
            moments = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
            if self.rank == 0:
                step = next(iter(self.engine.optimizer.state.values()))["step"]
                states[index] = {"step": step.clone()} | {name: tensor.cpu() for name, tensor in moments.items()}
        return {"state": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        zero = self.engine.optimizer
        zero.refresh_fp32_params()  # from the parameters that were loaded
        if not state["state"]:
            return
        for group in zero.param_groups:
            (partition,) = group["params"]
            moments = {name: torch.zeros_like(partition) for name in MOMENTS}
            zero.state[partition] = {"step": state["state"][0]["step"].clone(), **moments}
        self._link_moments()
        for index, parameter in enumerate(self.engine_parameters):
            for name in MOMENTS:
                value = state["state"][index][name].to(parameter.device)
                safe_set_full_optimizer_state(parameter, value, name)

    def _link_moments(self) -> None:
        """Tells the parameters where in the partition their moments are; DeepSpeed itself forgets later groups."""
        zero = self.engine.optimizer
        for group, parameters in zip(zero.param_groups, zero.bit16_groups, strict=True):
            lazy_init_hp_params_optimizer_state(parameters, group["params"][0], zero.state)

    def _share_memory(self) -> None:
        for own, engines in zip(self.parameters, self.engine_parameters, strict=True):
            own.data = engines.data


class _GivenGradient(torch.autograd.Function):
    """(parameter, gradient) -> 0, whose gradient with respect to the parameter is the one given; no temporaries."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(grad_output), None


def partition_base(transformer: nn.Module, config: dict[str, Any], device: torch.device, world_size: int) -> None:
    """Partition the parameters of a frozen module over all processes; each submodule's forward gathers its own.

    transformer: whole in CPU memory, the same on each process; called directly from then on. Buffers stay whole.
    """
    dtype = next(transformer.parameters()).dtype
    engine_config = _engine_config(config, 3, dtype, world_size)
    # Else `F.linear` is replaced in the whole process, for the sake of a backward pass that the base never has.
    engine_config["zero_optimization"]["memory_efficient_linear"] = False
    # Moves and partitions one parameter after the other, so no device ever holds the whole base.
    deepspeed.zero.Init(module=transformer, config_dict_or_path=engine_config, dtype=dtype)
    for module in transformer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    deepspeed.initialize(model=transformer, config=engine_config)
    transformer.requires_grad_(False).eval()


def _engine_config(config: dict[str, Any], stage: int, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
    """The user's, with what this project decides itself: batches, precision and learning rates."""
    own = (
        "optimizer",
        "scheduler",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    kept = {name: value for name, value in config.items() if name not in own and value != "auto"}
    zero = {name: value for name, value in config["zero_optimization"].items() if value not in ("auto", None)}
    return kept | {
        "zero_optimization": zero | {"stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }
