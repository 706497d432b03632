"""What a run is made of: base, heads, optimizer, teacher, plan, and the state of a run begun before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from medusa.base_model import BaseModel, load_base_model
from medusa.checkpoint import BaseReference
from medusa.conditioned_heads import make_heads
from medusa.config import HeadsConfig
from medusa.fingerprint import fingerprint
from medusa.heads import Heads

from .batching import split_holdout
from .config import TrainConfig
from .dataset import TokenizedDataset, frequent_tokens, token_coverage
from .distributed import Processes
from .faults import check_free_disk
from .features import OnlineHidden
from .joint import Adapter, Joint
from .labels import draft_index
from .loss import NUM_SUMS
from .metrics import MetricsFile
from .mixture import mix
from .schedule import StepPlan
from .state import TrainState, Window, flat_settings, load_state
from .step import Run
from .targets import Teacher
from .throughput import Throughput


@dataclass(frozen=True)
class Folders:
    """Places inside the output directory, which is the heads directory."""

    heads: Path

    @property
    def training(self) -> Path:
        return self.heads / "training"

    @property
    def checkpoint(self) -> Path:
        return self.training / "checkpoint.safetensors"

    @property
    def features(self) -> Path:
        return self.training / "features"

    @property
    def tokens(self) -> Path:
        return self.training / "tokens"

    @property
    def summary(self) -> Path:
        return self.training / "summary.json"


def load_base(config: TrainConfig, processes: Processes) -> tuple[BaseModel, BaseReference]:
    """The base to train on, and which one it is: in full precision, however it is held here."""
    model = config.model
    begins_on_cpu = processes.shards_base or model.quantization  # whole it may fit no single GPU
    base = load_plain_base(config, "cpu" if begins_on_cpu else processes.device)
    reference = BaseReference(base.name, fingerprint(base.model), base.revision)
    if model.quantization:
        del base
        base = load_base_model(
            model.base,
            dtype=model.dtype,
            device=processes.device,
            revision=model.revision,
            quantization=model.quantization,
        )
    return base, reference


def load_plain_base(config: TrainConfig, device: str | torch.device) -> BaseModel:
    model = config.model
    return load_base_model(model.base, dtype=model.dtype, device=device, revision=model.revision)


def resolve_dtype(config: TrainConfig, device: torch.device) -> TrainConfig:
    """`model.dtype: auto` made into what it means on this machine."""
    if config.model.dtype != "auto":
        return config
    dtype = "bfloat16" if _multiplies_bfloat16(device) else "float32"
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Private names: where a release lacks them, float32 is safe.
    probes = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("amx_tile", "avx512_bf16"))
    return device.type == "cpu" and any(probe is not None and bool(probe()) for probe in probes)


def prepare(
    config: TrainConfig,
    processes: Processes,
    base: BaseModel,
    reference: BaseReference,
    data: TokenizedDataset,
    folders: Folders,
    console: Console | None,
) -> Run:
    """Everything but the source of hidden states, with the state of a run begun before loaded."""
    say(console, str(data.statistics))
    if (longest := data.statistics.longest) > base.max_positions:
        raise ValueError(
            f"data: got a conversation of {longest} tokens, expected at most the {base.max_positions} positions that "
            f"{base.name!r} was made for; set data.max_length to {base.max_positions} or less"
        )
    training, held_out = split_holdout(len(data), config.data.holdout_fraction, config.train.seed)
    lengths = data.lengths if config.data.group_by_length else None
    mixture = mix(training, data.statistics.sources, config.train.seed)
    heads = _new_heads(config, base, processes.device, data, training, console)
    identity = flat_settings(config.model_dump(mode="json")) | {
        "base fingerprint": reference.fingerprint,
        "data fingerprint": data.fingerprint,
        "conversations of each source in an epoch": mixture.counts,
        # Per process, so that a run may go on with another number of processes and the same batches.
        "conversations per batch (optim.batch_size x processes)": config.optim.batch_size * processes.world_size,
    }
    teacher = _teacher(config, base, heads)
    if config.joint.rank:
        processes.check_base_may_be_trained()
    adapter = Adapter.attach(base, config.joint, config.train.seed) if config.joint.rank else None
    sums = torch.zeros(config.heads.num_heads, NUM_SUMS, dtype=torch.float64, device=processes.device)
    optimizer = processes.optimizer(_optimizer(config, heads, adapter), config.optim.max_grad_norm)
    state = TrainState(heads, optimizer, Window(sums, sums.new_zeros(2)), adapter)
    if folders.checkpoint.exists():
        load_state(folders.checkpoint, state, identity)
        say(console, f"continuing {folders.heads} after step {state.counters.step}")
    elif (folders.heads / "config.json").exists():
        raise ValueError(
            f"{folders.heads}: got heads already, of no run that can be continued, expected a new or unfinished output "
            "directory; delete it or set another train.output_dir"
        )
    processes.barrier()
    run = Run(
        config=config,
        processes=processes,
        state=state,
        source=online_source(config, base),
        teacher=teacher,
        joint=_joint(config, base, adapter) if adapter else None,
        examples=data.examples,
        held_out=held_out,
        plan=StepPlan(mixture, lengths, config.optim, config.train.seed, processes.world_size),
        base_to_draft=draft_index(heads.draft_token_ids, base.vocab_size).to(processes.device),
        checkpoint=folders.checkpoint,
        identity=identity,
        metrics=None,
        throughput=Throughput(processes.device, 0.0, 0.0),
        report=lambda progress, status: None,
    )
    if processes.is_main:
        check_free_disk(folders.training, heads)
        run.metrics = MetricsFile(folders.training / "metrics.jsonl", state.counters.step)
    return run


def _new_heads(
    config: TrainConfig,
    base: BaseModel,
    device: torch.device,
    data: TokenizedDataset,
    training: list[int],
    console: Console | None,
) -> Heads:
    settings = config.heads
    ids: Tensor | None = None
    if settings.draft_vocab_size is not None:
        examples = (data[i] for i in training)
        ids = frequent_tokens(examples, settings.draft_vocab_size, base.vocab_size, sorted(base.eos_token_ids))
        coverage = token_coverage((data[i] for i in training), ids)
        say(console, f"draft vocab    {len(ids):,} tokens, {coverage:.2%} of those under loss")
    design = HeadsConfig(
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        lm_head=settings.lm_head,
        draft_vocab_size=settings.draft_vocab_size,
        design=settings.design,
        markov_rank=settings.markov_rank if settings.design == "markov" else None,
        fused_layers=tuple(settings.fused_layers),
    )
    base.fuse_layers(design.fused_layers)
    heads = make_heads(design, ids).to(device)  # float32, whatever the base's dtype
    heads.init_from_base(base.lm_head_weight, base.embedding_weight)
    if settings.lm_head == "shared":
        heads.shared_projection.to(base.dtype)
    return heads


def _teacher(config: TrainConfig, base: BaseModel, heads: Heads) -> Teacher | None:
    if config.loss.objective == "cross_entropy":
        return None
    rows = heads.draft_token_ids
    weight, bias = base.lm_head_weight, base.lm_head_bias
    if config.heads.lm_head == "shared":
        weight = heads.lm_head_weight  # the same rows, held once
    elif rows is not None:
        weight = weight[rows]
    if bias is not None and rows is not None:
        bias = bias[rows]
    device = next(heads.parameters()).device
    weight, bias = weight.to(device), None if bias is None else bias.to(device)
    return Teacher(weight, bias, base.finish_logits, config.loss.num_target_tokens)


def _joint(config: TrainConfig, base: BaseModel, adapter: Adapter) -> Joint:
    teacher, loss = None, config.loss
    if config.joint.base_loss == "self":
        teacher = Teacher(base.lm_head_weight, base.lm_head_bias, base.finish_logits, loss.num_target_tokens)
    return Joint(base, adapter, config.joint, config.heads.num_heads, loss.chunk_size, teacher)


def _optimizer(config: TrainConfig, heads: Heads, adapter: Adapter | None) -> torch.optim.AdamW:
    matrices = [parameter for parameter in heads.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in heads.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.optim.weight_decay, "part": "heads"},
        {"params": biases, "weight_decay": 0.0, "part": "heads"},
    ]
    if adapter:
        adapted = [parameter for _, parameter in adapter.named_parameters()]
        groups.append({"params": adapted, "weight_decay": config.optim.weight_decay, "part": "adapter"})
    return torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas)


def online_source(config: TrainConfig, base: BaseModel) -> OnlineHidden:
    return OnlineHidden(base, config.heads.num_heads, config.data.max_length if config.data.packing else None)


def say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False, markup=False)
