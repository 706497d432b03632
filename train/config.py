"""Every setting of a training run, with its unit and default: one YAML file, `section.key=value` on top.

Unknown keys and wrong values are one-line errors that say got, expected and the nearest name. Values are checked here;
whether they fit the base model and the data shows when those are loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from .objectives import Objective

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Tracker = Literal["wandb", "tensorboard", "trackio"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The base model. `dtype`: of its weights and of the matrix products; the heads' own weights stay float32. auto:
    bfloat16 where the hardware multiplies it (GPUs, CPUs with AMX or AVX512-BF16), else float32.
    `quantization`: nf4 holds
    the base's linear layers in 4 bits while training (bitsandbytes); heads and adapter then belong to the base in full
    precision, which is loaded once, before, to know it again."""

    base: Annotated[str, Field(min_length=1)]
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    revision: str | None = None
    quantization: Literal["nf4"] | None = None


class HeadsSection(Section):
    """`design`: medusa, heads that are blind to each other's drafts; markov, plus a bias from the drafted token before,
    of rank `markov_rank`; hydra, heads that see all drafted tokens before theirs. `draft_vocab_size`: heads guess only
    among so many tokens, the most frequent of the data; null: all. `fused_layers`: layers of the base, the first is 1,
    whose outputs heads see beside the last hidden state. `save_dtype`: of the finished heads on disk; drafts
    are as good in half the size."""

    design: Literal["medusa", "markov", "hydra"] = "medusa"
    num_heads: Count = 4
    num_layers: Count = 1
    lm_head: Literal["own", "shared"] = "shared"
    draft_vocab_size: Count | None = None
    markov_rank: Count = 64
    fused_layers: list[Count] = []
    save_dtype: Literal["float32", "bfloat16"] = "float32"


class DataSource(Section):
    """`path`: a file or a Hub name. `weight`: how often an epoch has each conversation of it: 2 twice, 0.5 one half in
    one epoch and the other in the next."""

    path: str
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0


def as_sources(path: str | Sequence[str | DataSource]) -> list[DataSource]:
    """What data.path may hold, in its full form."""
    entries = [path] if isinstance(path, str) else path
    return [DataSource(path=entry) if isinstance(entry, str) else entry for entry in entries]


def _check_path(value: Any) -> Any:
    """Entries of data.path that are mappings made into sources; what is wrong with them as one line."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("a file, a Hub name, or a list of them or of {path: ..., weight: ...}")
    return [_check_entry(entry, f"data.path.{number}") for number, entry in enumerate(value)]


def _check_entry(entry: Any, name: str) -> str | DataSource:
    if isinstance(entry, (str, DataSource)):
        return entry
    known = list(DataSource.model_fields)
    if not isinstance(entry, dict):
        problem = f"{name}: got {entry!r}, expected a path or {{path: ..., weight: ...}}"
    elif unknown := [str(key) for key in entry if key not in known]:
        problem = f"unknown setting {name}.{unknown[0]}; expected one of {', '.join(known)}"
    else:
        try:
            return DataSource.model_validate(entry)
        except ValidationError as error:
            first = error.errors()[0]
            problem = _explain(first | {"loc": (name, *first["loc"])})
    raise PydanticCustomError("data_source", "{problem}", {"problem": problem})


class DataConfig(Section):
    """Which conversations are trained on, and how they reach the base. Formats, with examples: docs/data.md.

    `path`: a file (.jsonl, .json, either also .gz or .xz; .parquet), a Hub dataset ("org/name[:split]"), or a list of
    them, in which {path: ..., weight: ...} says how often an epoch has each conversation of one (default 1).
    `on_bad_record`: stop at a record that cannot be trained on, or skip and count it. `max_length`: tokens kept of a
    conversation. `holdout_fraction`: share of conversations kept for evaluation, whatever their source's weight.
    `limit`: use only the first so many conversations, of all sources together; null: all.

    `group_by_length`: batches of conversations of similar length, to save padding; false: any conversations.
    `packing`: the base reads several conversations in one row of up to `max_length` tokens, none of which sees
    another. Batches and losses are those without it; it saves padding where batches mix lengths, so it is of use with
    group_by_length=false.

    `num_workers`: processes that tokenise. `streaming`: tokens are kept in a file in the output directory, 4 bytes
    each, instead of in memory, and Hub datasets are read as they come instead of downloaded first. Neither changes what
    is trained on, nor its order."""

    path: Annotated[str | list[str | DataSource], BeforeValidator(_check_path)]
    on_bad_record: Literal["error", "skip"] = "error"
    max_length: Annotated[int, Field(ge=3)] = 1024
    holdout_fraction: Share = 0.02
    limit: Count | None = None
    group_by_length: bool = True
    packing: bool = False
    num_workers: Count = 1
    streaming: bool = False


class OptimConfig(Section):
    """AdamW. `warmup_ratio`: share of the run over which the rate rises to `lr`; it then falls by a cosine, or stays.
    `batch_size`: conversations per process and forward, packed or not; a step has batch_size x processes x
    gradient_accumulation."""

    lr: Positive = 1e-3
    weight_decay: NotNegative = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    warmup_ratio: Share = 0.05
    schedule: Literal["cosine", "constant"] = "cosine"
    max_grad_norm: Positive = 1.0
    batch_size: Count = 8
    gradient_accumulation: Count = 1
    epochs: Count = 2
    max_steps: Count | None = None


class LossConfig(Section):
    """`objective`: cross_entropy to the data's tokens; or to what the base itself expects there, distillation (soft
    cross-entropy), lk_hybrid or lk_log (losses made of the acceptance rate). `num_target_tokens`: of the base's
    distribution, so many likeliest tokens are kept. `head_decay`: head k counts head_decay^k. `chunk_size`: rows
    projected to the vocabulary at once."""

    objective: Objective = "cross_entropy"
    num_target_tokens: Count = 16
    head_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    chunk_size: Count = 256


class JointConfig(Section):
    """Medusa-2: the base adapted by LoRA together with the heads. `rank` null: Medusa-1, the base stays as it is.
    `head_lr_multiple`: the heads learn at optim.lr, the adapter at this part of it. `start`: share of the run in which
    the heads are trained alone; over the next `warmup` of it the adapter's rate and lambda_0 rise from 0.
    `heads_weight`: lambda_0, the heads' loss against the base's own. `base_loss`: data, to the data's tokens; self, to
    what the base said before. `save_merged`: also write the base with the adapter merged into its weights."""

    rank: Count | None = None
    alpha: Positive = 32.0
    target_modules: str | list[str] = "all-linear"
    head_lr_multiple: Positive = 4.0
    start: Share = 0.0
    warmup: Annotated[float, Field(gt=0, le=1)] = 0.2
    heads_weight: NotNegative = 0.2
    base_loss: Literal["data", "self"] = "data"
    save_merged: bool = False


class RunConfig(Section):
    """`*_every`: in optimizer steps; `eval_every` null: only at the end. The
    heads with the highest simulated tau on held-out conversations are kept; `patience`: stop after so many evaluations
    without a higher one; null: never. `cache_hidden_states`: compute the frozen
    base's hidden states once, on disk, instead of in every epoch. `time_limit_s`: seconds of training after which it
    stops, the learning rate's schedule fitted to that; hidden states computed beforehand do not count. `trackers`:
    where the numbers of metrics.jsonl go too; `tracker_project`: their project's name."""

    output_dir: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    log_every: Count = 10
    save_every: Count = 100
    eval_every: Count | None = None
    patience: Count | None = None
    cache_hidden_states: bool = False
    keep_hidden_states: bool = False
    time_limit_s: Positive | None = None
    trackers: list[Tracker] = []
    tracker_project: str = "medusa"

    @model_validator(mode="after")
    def _evaluates_while_it_waits(self) -> RunConfig:
        if self.patience and not self.eval_every:
            raise ValueError("patience to come with eval_every, the steps between the evaluations that it counts")
        return self


class TrainConfig(Section):
    model: ModelConfig
    heads: HeadsSection = HeadsSection()
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    joint: JointConfig = JointConfig()
    train: RunConfig

    @model_validator(mode="after")
    def _states_are_frozen_where_they_are_kept(self) -> TrainConfig:
        if self.joint.rank and self.train.cache_hidden_states:
            raise ValueError(
                "joint.rank or train.cache_hidden_states, not both: an adapted base has new hidden states in every "
                "step; set train.cache_hidden_states=false"
            )
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A YAML file with `section.key=value` overrides (values are YAML too). Raises ValueError, one line."""
    path = Path(path)
    if not path.is_file():
        got = "a directory" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: got {got}, expected a YAML config such as configs/train/quickstart.yaml")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: got broken YAML ({reason}), expected sections of settings") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: got a {type(content).__name__}, expected sections: {', '.join(TrainConfig.model_fields)}"
        )
    for override in overrides:
        _apply(content, override)
    try:
        return TrainConfig.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise ValueError(f"{path}: {problems}") from None


def _apply(content: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise ValueError(f"override {override!r}: got no setting, expected section.key=value, such as optim.lr=1e-3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(
            f"override {override!r}: got a value that is no YAML, expected such as 1e-3 or 'text'"
        ) from error
    if content.get(section) is None:
        content[section] = {}
    if not isinstance(content[section], dict):
        raise ValueError(f"section {section}: got {content[section]!r}, expected settings under it, as {section}.{key}")
    content[section][key] = value


def _explain(problem: Any) -> str:
    if problem["type"] == "data_source":
        return str(problem["msg"])
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = _known_names(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"expected one of {', '.join(known)}"
        return f"unknown setting {name}; {hint}"
    if problem["type"] == "missing":
        return f"{name} is not set; it has no default"
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):  # of several settings together
        return f"{name}: expected {problem['msg'].removeprefix('Value error, ')}".removeprefix(": ")
    message = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{name}: got {problem['input']!r}, expected {message}"


def _known_names(path: list[str]) -> list[str]:
    model: type[BaseModel] = TrainConfig
    for part in path:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)
