"""The processes of a run: who they are, how they exchange tensors, and what each strategy shards among them.

The only file that knows torch.distributed. Rank and world size come from there, not from accelerate, which on a CPU
under DeepSpeed believes in one process. A strategy never changes what is computed, only where tensors lie:

    ddp     the base and the heads whole on every process
    fsdp2   the base sharded, layer by layer; the heads whole
    zero2   the base whole; gradients and optimizer state of the heads partitioned by DeepSpeed
    zero3   the base partitioned by DeepSpeed too
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from medusa.base_model import BaseModel
from medusa.fingerprint import own_tensors

from .optimizer import ReplicatedOptimizer, RunOptimizer

Strategy = Literal["ddp", "fsdp2", "zero2", "zero3"]


@dataclass(frozen=True)
class Processes:
    """This process among `world_size`, numbered by `rank`. A single one shards nothing: its strategy is ddp."""

    accelerator: Accelerator
    strategy: Strategy
    rank: int
    world_size: int

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shards_base(self) -> bool:
        return self.strategy in ("fsdp2", "zero3")

    def reduce(self, tensor: Tensor) -> Tensor:
        """The sum over processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, rows: Tensor) -> Tensor:
        """[m_i, ...] of each process -> [sum m_i, ...] on all, in order of ranks. m_i may differ, and be 0."""
        if self.world_size == 1:
            return rows
        counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=self.device))
        most = max(int(count) for count in counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def largest(self, number: int) -> int:
        """The largest of all processes' numbers."""
        return int(self.gather(torch.tensor([number], device=self.device)).max())

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def check_base_may_be_trained(self) -> None:
        """Raises ValueError where this strategy shards the base, which then has to be frozen."""
        if self.shards_base:
            raise ValueError(
                f"launch: got strategy {self.strategy}, which shards a frozen base, with a base that is trained too; "
                "expected ddp or zero2; launch with configs/accelerate/ddp.yaml or zero2.yaml"
            )

    def shard_base(self, base: BaseModel) -> None:
        """Spread the transformer of a base, loaded whole in CPU memory, over the processes' devices.

        Its lm_head is left out, for training never multiplies by it: take what you need of it before. Every process
        must run the base equally often from here on.
        """
        if not self.shards_base:
            return
        if self.strategy == "zero3":
            from .deepspeed_engine import partition_base

            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            partition_base(base.model.base_model, config, self.device, self.world_size)
        else:
            _fully_shard(base, self.device, self.world_size)

    def describe(self, base: BaseModel) -> str:
        """The strategy, and how many of the base's layers' parameters this process holds."""
        layers = nn.ModuleList(decoder_layers(base))
        held = sum(tensor.numel() for tensor in frozen_tensors(layers).values())
        frozen = (parameter for parameter in layers.parameters() if not parameter.requires_grad)
        total = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in frozen)
        return f"{self.strategy}: {held:,} of {total:,} parameters of base layers each"

    def optimizer(self, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> RunOptimizer:
        """What steps the parameters of a fresh torch optimizer on gradients that are sums on each process."""
        if self.strategy in ("zero2", "zero3"):
            from .deepspeed_engine import ZeroOptimizer

            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            return ZeroOptimizer(optimizer, max_grad_norm, config, self.rank, self.world_size)
        return ReplicatedOptimizer(optimizer, max_grad_norm, self.reduce)


def start_processes(trackers: Sequence[str] = (), tracker_dir: Path | None = None) -> Processes:
    """Joins the others that the launcher started, by its environment variables; alone without any.

    trackers: accelerate's names of those to be started later; tracker_dir: where they may keep files.

    Raises ValueError for a launch that cannot be honoured: DeepSpeed that is not installed, FSDP 1, offloading.
    """
    strategy = _strategy()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available() and strategy not in ("zero2", "zero3"),
        log_with=list(trackers) or None,
        project_dir=tracker_dir,
    )
    if strategy in ("zero2", "zero3"):
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        from .deepspeed_engine import checked_stage

        unset_hf_deepspeed_config()  # else from_pretrained returns a base that nothing can be taken from any more
        strategy = checked_stage(accelerator.state.deepspeed_plugin.deepspeed_config)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Processes(accelerator, "ddp", 0, 1)
    return Processes(accelerator, strategy, dist.get_rank(), dist.get_world_size())


def _strategy() -> Strategy:
    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(
                "launch: got a launch with DeepSpeed (ACCELERATE_USE_DEEPSPEED), expected it to be installed; "
                "pip install 'medusa-decoding[deepspeed]', or launch with configs/accelerate/fsdp2.yaml or ddp.yaml"
            )
        return "zero2"  # or 3: known once accelerate has read the DeepSpeed config
    if not _is_set("ACCELERATE_USE_FSDP"):
        return "ddp"
    for name, expected in {
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",  # would leave the base's weights out on all ranks but the first
    }.items():
        if (got := os.environ.get(name, expected)).lower() != expected:
            raise ValueError(
                f"launch: got {name.lower()} {got}, expected {expected}; set it in your launch config, or use "
                "configs/accelerate/fsdp2.yaml"
            )
    return "fsdp2"


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


def _fully_shard(base: BaseModel, device: torch.device, world_size: int) -> None:
    mesh = init_device_mesh(device.type, (world_size,))
    # Each layer is moved to the device and cut up before the next, so no device ever holds the whole base.
    is_freed = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    for layer in decoder_layers(base):
        fully_shard(layer, mesh=mesh, reshard_after_forward=is_freed)
    fully_shard(base.model.base_model, mesh=mesh, reshard_after_forward=is_freed)


def decoder_layers(base: BaseModel) -> list[nn.Module]:
    """The base's layers: the one list of modules that is as long as its config says."""
    count = base.config.num_hidden_layers
    lists = [m for m in base.model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    assert lists, f"{base.name}: no list of {count} layers"
    return list(lists[0])


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What this process holds of a model, sharded in any way or not: its shards of frozen parameters, saved buffers."""
    return {name: _local(tensor) for name, tensor in own_tensors(model).items() if not tensor.requires_grad}


def _local(tensor: Tensor | DTensor) -> Tensor:
    if isinstance(tensor, DTensor):
        shard: Tensor = tensor.to_local()
        return shard.detach()
    partition: Tensor = getattr(tensor, "ds_tensor", tensor)  # DeepSpeed hangs it onto the emptied parameter
    return partition.detach()


@contextmanager
def lost_peer_advice(processes: Processes) -> Iterator[None]:
    """Raises RuntimeError in place of whatever an exchange reports after another process has died."""
    try:
        yield
    except RuntimeError as error:
        if processes.world_size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RuntimeError(
            f"process {processes.rank} of {processes.world_size}: lost another process, whose own message says why it "
            "ended; what was saved last is intact, run the same command again to continue from there "
            f"({str(error).splitlines()[0].split('. ')[0]})"
        ) from error
