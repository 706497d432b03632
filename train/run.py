"""A training run from its config: load the base and the data, make heads, continue what is there, train, save.

Writes a heads directory: `config.json`, `heads.safetensors`, and `training/` with the resolved config, the command,
versions, metrics, a summary, and the checkpoint that an interrupted run continues from.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

from medusa.base_model import BaseModel, load_base_model
from medusa.checkpoint import BaseReference, HeadsInfo, save_heads, write_atomically
from medusa.config import HeadsConfig
from medusa.fingerprint import fingerprint, tensors_fingerprint
from medusa.heads import MedusaHeads
from medusa.progress import StageProgress

from .batching import Example, split_holdout
from .config import TrainConfig, load_config
from .dataset import TokenizedDataset, build_dataset, frequent_tokens, token_coverage
from .distributed import Processes, local_tensors, lost_peer_advice, start_processes
from .evaluation import restore_best
from .faults import memory_advice
from .features import CachedHidden, FeatureLayout, HiddenSource, OnlineHidden, compute_features, prepare_folder
from .labels import draft_index
from .loop import train_loop
from .loss import NUM_SUMS
from .metrics import MetricsFile
from .schedule import StepPlan
from .state import TrainState, Window, flat_settings, load_state
from .step import Run
from .targets import Teacher

__all__ = ["TrainResult", "load_config", "train"]


@dataclass(frozen=True)
class TrainResult:
    """`tokens` and `labels` trained on, over all epochs; `seconds` of training alone; `features_seconds` before it.
    `held_out`: loss and accuracy per head (see metrics.py), None without held-out data."""

    heads_dir: str
    steps: int
    tokens: int
    labels: int
    empty_steps: int
    seconds: float
    features_seconds: float
    tokens_per_second: float
    stop_reason: str
    held_out: dict[str, Any] | None


@dataclass(frozen=True)
class Folders:
    """Places inside the output directory."""

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
    def summary(self) -> Path:
        return self.training / "summary.json"


def train(config: TrainConfig, console: Console | None = None) -> TrainResult:
    """Trains heads as `config` says, or continues, or returns what is finished there. `console` None: silent.

    Raises ValueError for what a user can set right, TrainingInterrupted after SIGINT or SIGTERM, NonFiniteLoss.
    """
    processes = start_processes()
    with lost_peer_advice(processes):
        return _train(config, processes, console if processes.is_main else None)


def _train(config: TrainConfig, processes: Processes, console: Console | None) -> TrainResult:
    folders = Folders(Path(config.train.output_dir))
    config = resolve_dtype(config, processes.device)
    device = "cpu" if processes.shards_base else processes.device  # whole it may fit no single GPU
    base = load_base_model(config.model.base, dtype=config.model.dtype, device=device, revision=config.model.revision)
    data = build_dataset(
        config.data.path, base.tokenizer, config.data.max_length, config.data.on_bad_record, config.data.limit, console
    )
    run, info = _prepare(config, processes, base, data, folders, console)
    if run.state.counters.stop_reason and folders.summary.exists() and (folders.heads / "config.json").exists():
        _say(console, f"finished already: {folders.heads}; delete it or set another train.output_dir to train anew")
        return TrainResult(**json.loads(folders.summary.read_text(encoding="utf-8")))
    processes.shard_base(base)
    before = tensors_fingerprint(local_tensors(base.model))
    if processes.world_size > 1:
        _say(console, f"processes      {processes.world_size}, {processes.describe(base)}")
    began = time.perf_counter()
    with memory_advice("computing hidden states"):
        run.source = _source(run, base, folders, console)
    features_seconds = time.perf_counter() - began
    with memory_advice("training"), StageProgress("Training heads", 1.0, console) as bar:
        run.report = bar.update
        train_loop(run)
    held_out, counters = restore_best(run), run.state.counters
    if held_out and counters.best_step != counters.step:
        _say(console, f"keeping the heads of step {counters.best_step}: no later ones had a higher tau")
    if tensors_fingerprint(local_tensors(base.model)) != before:
        raise RuntimeError(f"base model {base.name!r} changed during training; no heads were written. This is a bug")
    result = _result(run, folders, features_seconds, held_out)
    if processes.is_main:
        save_heads(folders.heads, run.state.heads, info)
        _write_json(folders.summary, asdict(result))
        if not config.train.keep_hidden_states:
            shutil.rmtree(folders.features, ignore_errors=True)
    processes.barrier()
    return result


def resolve_dtype(config: TrainConfig, device: torch.device) -> TrainConfig:
    """`model.dtype: auto` made into what it means on this machine."""
    if config.model.dtype != "auto":
        return config
    dtype = "bfloat16" if _multiplies_bfloat16(device) else "float32"
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private: where a release lacks it, float32 is safe
    return device.type == "cpu" and has_amx is not None and bool(has_amx())


def _prepare(
    config: TrainConfig,
    processes: Processes,
    base: BaseModel,
    data: TokenizedDataset,
    folders: Folders,
    console: Console | None,
) -> tuple[Run, HeadsInfo]:
    """Everything but the source of hidden states, with the state of a run begun before loaded."""
    _say(console, str(data.statistics))
    if (longest := data.statistics.longest) > base.max_positions:
        raise ValueError(
            f"data: got a conversation of {longest} tokens, expected at most the {base.max_positions} positions that "
            f"{base.name!r} was made for; set data.max_length to {base.max_positions} or less"
        )
    training, held_out = split_holdout(len(data), config.data.holdout_fraction, config.train.seed)
    lengths = [data.lengths[i] for i in training] if config.data.group_by_length else None
    heads = _new_heads(config, base, processes.device, [data[i] for i in training], console)
    info = HeadsInfo(BaseReference(base.name, fingerprint(base.model), base.revision))
    identity = flat_settings(config.model_dump(mode="json")) | {
        "base fingerprint": info.base_model.fingerprint,
        "data fingerprint": data_fingerprint(data.examples),
        # Per process, so that a run may go on with another number of processes and the same batches.
        "conversations per batch (optim.batch_size x processes)": config.optim.batch_size * processes.world_size,
    }
    state = TrainState(heads, processes.optimizer(_optimizer(config, heads), config.optim.max_grad_norm))
    state.window = Window(torch.zeros(config.heads.num_heads, NUM_SUMS, dtype=torch.float64, device=processes.device))
    if folders.checkpoint.exists():
        load_state(folders.checkpoint, state, identity)
        _say(console, f"continuing {folders.heads} after step {state.counters.step}")
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
        source=OnlineHidden(base, config.heads.num_heads),
        teacher=_teacher(config, base, heads),
        examples=data.examples,
        held_out=held_out,
        plan=StepPlan(training, lengths, config.optim, config.train.seed, processes.world_size),
        base_to_draft=draft_index(heads.draft_token_ids, base.vocab_size).to(processes.device),
        checkpoint=folders.checkpoint,
        identity=identity,
        metrics=None,
        report=lambda progress, status: None,
    )
    if processes.is_main:
        _write_records(config, folders)
        run.metrics = MetricsFile(folders.training / "metrics.jsonl", state.counters.step)
    return run, info


def _new_heads(
    config: TrainConfig, base: BaseModel, device: torch.device, examples: Sequence[Example], console: Console | None
) -> MedusaHeads:
    settings = config.heads
    ids: Tensor | None = None
    if settings.draft_vocab_size is not None:
        ids = frequent_tokens(examples, settings.draft_vocab_size, base.vocab_size, sorted(base.eos_token_ids))
        _say(console, f"draft vocab    {len(ids):,} tokens, {token_coverage(examples, ids):.2%} of those under loss")
    design = HeadsConfig(
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        lm_head=settings.lm_head,
        draft_vocab_size=settings.draft_vocab_size,
    )
    heads = MedusaHeads(design, ids).to(device)  # float32, whatever the base's dtype
    heads.init_from_lm_head(base.lm_head_weight)
    if settings.lm_head == "shared":
        heads.shared_projection.to(base.dtype)
    return heads


def _teacher(config: TrainConfig, base: BaseModel, heads: MedusaHeads) -> Teacher | None:
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


def _optimizer(config: TrainConfig, heads: MedusaHeads) -> torch.optim.AdamW:
    matrices = [parameter for parameter in heads.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in heads.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.optim.weight_decay}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas)


def _source(run: Run, base: BaseModel, folders: Folders, console: Console | None) -> HiddenSource:
    config, processes = run.config, run.processes
    if not config.train.cache_hidden_states:
        return OnlineHidden(base, config.heads.num_heads)
    layout = FeatureLayout(folders.features, run.examples, config.heads.num_heads, base.hidden_size, base.dtype)
    names = ("base fingerprint", "data fingerprint", "model.dtype", "heads.num_heads")
    identity = json.dumps({name: run.identity[name] for name in names}, sort_keys=True)
    if processes.is_main:
        missing = prepare_folder(layout, identity)
        _say(console, f"hidden states  {missing / 1e6:,.0f} MB to compute into {folders.features}")
    processes.barrier()
    own = range(processes.rank, len(layout.shards), processes.world_size)
    forwards = layout.num_forwards(own, config.optim.batch_size)
    most_forwards = processes.largest(forwards)
    began, done, computed = time.perf_counter(), 0, 0
    with StageProgress("Hidden states", sum(layout.num_tokens(n) for n in own), console) as bar:

        def progress(tokens: int, is_new: bool) -> None:
            nonlocal done, computed
            done, computed = done + tokens, computed + tokens * is_new
            bar.update(done, f"{computed / (time.perf_counter() - began):,.0f} tokens/s")

        compute_features(layout, base, config.optim.batch_size, own, progress)
    for _ in range(most_forwards - forwards):
        run.source.idle()
    processes.barrier()
    return CachedHidden(layout)


def _result(run: Run, folders: Folders, features_seconds: float, held_out: dict[str, Any] | None) -> TrainResult:
    counters = run.state.counters
    assert counters.stop_reason is not None
    return TrainResult(
        heads_dir=str(folders.heads),
        steps=counters.step,
        tokens=counters.tokens,
        labels=counters.labels,
        empty_steps=counters.empty_steps,
        seconds=counters.seconds,
        features_seconds=features_seconds,
        tokens_per_second=counters.tokens / max(counters.seconds, 1e-9),
        stop_reason=counters.stop_reason,
        held_out=held_out,
    )


def data_fingerprint(examples: Sequence[Example]) -> str:
    """sha256 (hex) of all token ids and loss masks."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example).to_bytes(8, "little"))
        digest.update(example.input_ids.numpy().tobytes())
        digest.update(example.loss_mask.numpy().tobytes())
    return digest.hexdigest()


def _write_records(config: TrainConfig, folders: Folders) -> None:
    """How these heads were made: enough to make them again."""
    folders.training.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("medusa-decoding", "torch", "transformers", "accelerate")}
    _write_json(folders.training / "versions.json", {"python": platform.python_version(), **versions})
    texts = {
        "config.yaml": yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False),
        "command": shlex.join(sys.argv) + "\n",
    }
    for name, text in texts.items():
        (folders.training / name).write_text(text, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically({path: lambda file: file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")})


def _say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False, markup=False)
