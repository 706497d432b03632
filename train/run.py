"""A training run from its config: load the base and the data, make heads, continue what is there, train, save.

Writes a heads directory: `config.json`, `heads.safetensors`, and `training/` with the resolved config, a record of how
it was run, metrics, a summary, and the checkpoint that an interrupted run continues from.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from medusa.adapter import ADAPTER_FOLDER
from medusa.base_model import BaseModel, load_base_model
from medusa.checkpoint import BaseReference, HeadsInfo, save_heads, write_atomically
from medusa.config import HeadsConfig
from medusa.fingerprint import fingerprint, full_fingerprint
from medusa.heads import MedusaHeads
from medusa.progress import StageProgress

from .batching import split_holdout
from .config import TrainConfig, load_config
from .dataset import TokenizedDataset, frequent_tokens, load_data, token_coverage
from .evaluation import restore_best
from .faults import check_free_disk, memory_advice
from .features import CachedHidden, FeatureLayout, HiddenSource, OnlineHidden, compute_features, prepare_folder
from .forward_speed import choose_throughput
from .joint import Adapter, Joint, merge_saved
from .labels import draft_index
from .lock import claim_folder
from .loop import train_loop
from .loss import NUM_SUMS
from .metrics import MetricsFile
from .mixture import mix
from .record import record_start
from .schedule import StepPlan
from .state import TrainState, Window, flat_settings, load_state
from .step import Run
from .targets import Teacher
from .throughput import Throughput
from .trackers import TRACKER_DIR, check_trackers, tracking

__all__ = ["TrainResult", "load_config", "train"]


@dataclass(frozen=True)
class TrainResult:
    """`tokens` and `labels` trained on, over all epochs; `seconds` of training alone; `features_seconds` before it.
    `held_out`: loss and accuracy per head (see metrics.py), None without held-out data. `mfu`, `share_of_forward` (None
    where not known) and `peak_memory_bytes` (of the last start): see throughput.py."""

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
    mfu: float | None = None
    share_of_forward: float | None = None
    peak_memory_bytes: int | None = None


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
    def tokens(self) -> Path:
        return self.training / "tokens"

    @property
    def summary(self) -> Path:
        return self.training / "summary.json"


def train(config: TrainConfig, console: Console | None = None) -> TrainResult:
    """Trains heads as `config` says, or continues, or returns what is finished there. `console` None: silent.

    Raises ValueError for what a user can set right, TrainingInterrupted after SIGINT or SIGTERM, NonFiniteLoss.
    """
    check_trackers(config.train.trackers)
    folders = Folders(Path(config.train.output_dir))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        log_with=list(config.train.trackers) or None,
        project_dir=folders.training / TRACKER_DIR,
    )
    with claim_folder(folders.training) if accelerator.is_main_process else nullcontext():
        return _train(config, accelerator, folders, console if accelerator.is_main_process else None)


def _train(config: TrainConfig, accelerator: Accelerator, folders: Folders, console: Console | None) -> TrainResult:
    config = resolve_dtype(config, accelerator.device)
    base, reference = _load_base(config, accelerator.device)
    before = full_fingerprint(base.model)
    data = load_data(config.data, base.tokenizer, folders.tokens, accelerator.is_main_process, console)
    run = _prepare(config, accelerator, base, reference, data, folders, console)
    if run.state.counters.stop_reason and folders.summary.exists() and (folders.heads / "config.json").exists():
        _say(console, f"finished already: {folders.heads}; delete it or set another train.output_dir to train anew")
        return TrainResult(**json.loads(folders.summary.read_text(encoding="utf-8")))
    record = record_start(run, asdict(reference), data.statistics, folders.training)
    with tracking(accelerator, config, record) as trackers:
        if run.metrics:
            run.metrics.also = trackers.log
        began = time.perf_counter()
        with memory_advice("computing hidden states"):
            run.source = _source(run, base, folders, console)
        features_seconds = time.perf_counter() - began
        with memory_advice("training"):
            run.throughput = choose_throughput(run, base, console)
            with StageProgress("Training heads", 1.0, console) as bar:
                run.report = bar.update
                train_loop(run)
    held_out, counters = restore_best(run), run.state.counters
    if held_out and counters.best_step != counters.step:
        _say(console, f"keeping the heads of step {counters.best_step}: no later ones had a higher tau")
    if adapter := run.state.adapter:
        if accelerator.is_main_process:
            adapter.save(folders.heads / ADAPTER_FOLDER)
        adapter.detach()
    if full_fingerprint(base.model) != before:
        raise RuntimeError(f"base model {base.name!r} changed during training; no heads were written. This is a bug")
    result = _result(run, folders, features_seconds, held_out)
    if accelerator.is_main_process:
        info = HeadsInfo(reference)
        if adapter:
            merged = folders.heads / "merged" if config.joint.save_merged else None
            plain = _load_plain_base(config, "cpu") if config.model.quantization else base
            info = replace(info, adapter=merge_saved(plain, folders.heads / ADAPTER_FOLDER, merged))
        save_heads(folders.heads, run.state.heads, info)
        _write_json(folders.summary, asdict(result))
        shutil.rmtree(folders.tokens, ignore_errors=True)
        if not config.train.keep_hidden_states:
            shutil.rmtree(folders.features, ignore_errors=True)
    accelerator.wait_for_everyone()
    return result


def _load_base(config: TrainConfig, device: torch.device) -> tuple[BaseModel, BaseReference]:
    """The base to train on, and which one it is: in full precision, however it is held here."""
    model = config.model
    base = _load_plain_base(config, "cpu" if model.quantization else device)
    reference = BaseReference(base.name, fingerprint(base.model), base.revision)
    if model.quantization:
        del base
        base = load_base_model(
            model.base, dtype=model.dtype, device=device, revision=model.revision, quantization=model.quantization
        )
    return base, reference


def _load_plain_base(config: TrainConfig, device: str | torch.device) -> BaseModel:
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


def _prepare(
    config: TrainConfig,
    accelerator: Accelerator,
    base: BaseModel,
    reference: BaseReference,
    data: TokenizedDataset,
    folders: Folders,
    console: Console | None,
) -> Run:
    """Everything but the source of hidden states, with the state of a run begun before loaded."""
    _say(console, str(data.statistics))
    if (longest := data.statistics.longest) > base.max_positions:
        raise ValueError(
            f"data: got a conversation of {longest} tokens, expected at most the {base.max_positions} positions that "
            f"{base.name!r} was made for; set data.max_length to {base.max_positions} or less"
        )
    training, held_out = split_holdout(len(data), config.data.holdout_fraction, config.train.seed)
    lengths = data.lengths if config.data.group_by_length else None
    mixture = mix(training, data.statistics.sources, config.train.seed)
    heads = _new_heads(config, base, data, training, console)
    identity = flat_settings(config.model_dump(mode="json")) | {
        "base fingerprint": reference.fingerprint,
        "data fingerprint": data.fingerprint,
        "conversations of each source in an epoch": mixture.counts,
        # Per process, so that a run may go on with another number of processes and the same batches.
        "conversations per batch (optim.batch_size x processes)": config.optim.batch_size * accelerator.num_processes,
    }
    teacher = _teacher(config, base, heads)
    adapter = Adapter.attach(base, config.joint, config.train.seed) if config.joint.rank else None
    sums = torch.zeros(config.heads.num_heads, NUM_SUMS, dtype=torch.float64, device=accelerator.device)
    state = TrainState(heads, _optimizer(config, heads, adapter), Window(sums, sums.new_zeros(2)), adapter)
    if folders.checkpoint.exists():
        load_state(folders.checkpoint, state, identity)
        _say(console, f"continuing {folders.heads} after step {state.counters.step}")
    elif (folders.heads / "config.json").exists():
        raise ValueError(
            f"{folders.heads}: got heads already, of no run that can be continued, expected a new or unfinished output "
            "directory; delete it or set another train.output_dir"
        )
    accelerator.wait_for_everyone()
    run = Run(
        config=config,
        accelerator=accelerator,
        state=state,
        source=_online(config, base),
        teacher=teacher,
        joint=_joint(config, base, adapter) if adapter else None,
        examples=data.examples,
        held_out=held_out,
        plan=StepPlan(mixture, lengths, config.optim, config.train.seed, accelerator.num_processes),
        base_to_draft=draft_index(heads.draft_token_ids, base.vocab_size).to(accelerator.device),
        checkpoint=folders.checkpoint,
        identity=identity,
        metrics=None,
        throughput=Throughput(accelerator.device, 0.0, 0.0),
        report=lambda progress, status: None,
    )
    if accelerator.is_main_process:
        check_free_disk(folders.training, heads)
        run.metrics = MetricsFile(folders.training / "metrics.jsonl", state.counters.step)
    return run


def _new_heads(
    config: TrainConfig, base: BaseModel, data: TokenizedDataset, training: list[int], console: Console | None
) -> MedusaHeads:
    settings = config.heads
    ids: Tensor | None = None
    if settings.draft_vocab_size is not None:
        examples = (data[i] for i in training)
        ids = frequent_tokens(examples, settings.draft_vocab_size, base.vocab_size, sorted(base.eos_token_ids))
        coverage = token_coverage((data[i] for i in training), ids)
        _say(console, f"draft vocab    {len(ids):,} tokens, {coverage:.2%} of those under loss")
    design = HeadsConfig(
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        lm_head=settings.lm_head,
        draft_vocab_size=settings.draft_vocab_size,
    )
    heads = MedusaHeads(design, ids).to(base.device)  # float32, whatever the base's dtype
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
    return Teacher(weight, bias, base.finish_logits, config.loss.num_target_tokens)


def _joint(config: TrainConfig, base: BaseModel, adapter: Adapter) -> Joint:
    teacher, loss = None, config.loss
    if config.joint.base_loss == "self":
        teacher = Teacher(base.lm_head_weight, base.lm_head_bias, base.finish_logits, loss.num_target_tokens)
    return Joint(base, adapter, config.joint, config.heads.num_heads, loss.chunk_size, teacher)


def _optimizer(config: TrainConfig, heads: MedusaHeads, adapter: Adapter | None) -> torch.optim.AdamW:
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


def _online(config: TrainConfig, base: BaseModel) -> OnlineHidden:
    return OnlineHidden(base, config.heads.num_heads, config.data.max_length if config.data.packing else None)


def _source(run: Run, base: BaseModel, folders: Folders, console: Console | None) -> HiddenSource:
    config, accelerator = run.config, run.accelerator
    if not config.train.cache_hidden_states:
        return _online(config, base)
    layout = FeatureLayout(folders.features, run.examples, config.heads.num_heads, base.hidden_size, base.dtype)
    names = ("base fingerprint", "data fingerprint", "model.dtype", "heads.num_heads")
    identity = json.dumps({name: run.identity[name] for name in names}, sort_keys=True)
    if accelerator.is_main_process:
        missing = prepare_folder(layout, identity)
        _say(console, f"hidden states  {missing / 1e6:,.0f} MB to compute into {folders.features}")
    accelerator.wait_for_everyone()
    own = range(accelerator.process_index, len(layout.shards), accelerator.num_processes)
    began, done, computed = time.perf_counter(), 0, 0
    with StageProgress("Hidden states", sum(layout.num_tokens(n) for n in own), console) as bar:

        def progress(tokens: int, is_new: bool) -> None:
            nonlocal done, computed
            done, computed = done + tokens, computed + tokens * is_new
            bar.update(done, f"{computed / (time.perf_counter() - began):,.0f} tokens/s")

        compute_features(layout, _online(config, base), config.optim.batch_size, own, progress)
    accelerator.wait_for_everyone()
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
        stop_reason=counters.stop_reason,
        held_out=held_out,
        **run.throughput.measures(counters.tokens, counters.labels, counters.seconds),
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically({path: lambda file: file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")})


def _say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False, markup=False)
