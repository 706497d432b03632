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
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .objectives import Objective

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The base model. `dtype`: of its weights and of the matrix products; the heads' own weights stay float32. auto:
    bfloat16 where the hardware has matrix units for it (GPUs, CPUs with AMX), else float32."""

    base: str
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    revision: str | None = None


class HeadsSection(Section):
    """`draft_vocab_size`: heads guess only among so many tokens, the most frequent of the data; null: all."""

    num_heads: Count = 4
    num_layers: Count = 1
    lm_head: Literal["own", "shared"] = "shared"
    draft_vocab_size: Count | None = None


class DataConfig(Section):
    """`max_length`: tokens kept of a conversation. `holdout_fraction`: share of conversations kept for evaluation.
    `limit`: use only the first so many conversations; null: all."""

    path: str | list[str]
    on_bad_record: Literal["error", "skip"] = "error"
    max_length: Annotated[int, Field(ge=3)] = 1024
    holdout_fraction: Share = 0.02
    group_by_length: bool = True
    packing: bool = False
    limit: Count | None = None


class OptimConfig(Section):
    """AdamW. `warmup_ratio`: share of the run over which the rate rises to `lr`; it then falls by a cosine, or stays.
    `batch_size`: conversations per process and forward; a step has batch_size x processes x gradient_accumulation."""

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


class RunConfig(Section):
    """`*_every`: in optimizer steps; `eval_every` null: only at the end. The
    heads with the highest simulated tau on held-out conversations are kept; `patience`: stop after so many evaluations
    without a higher one; null: never. `cache_hidden_states`: compute the frozen
    base's hidden states once, on disk, instead of in every epoch. `time_limit_s`: seconds of training after which it
    stops, the learning rate's schedule fitted to that; hidden states computed beforehand do not count."""

    output_dir: str
    seed: Annotated[int, Field(ge=0)] = 0
    log_every: Count = 10
    save_every: Count = 100
    eval_every: Count | None = None
    patience: Count | None = None
    cache_hidden_states: bool = False
    keep_hidden_states: bool = False
    time_limit_s: Positive | None = None

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
    train: RunConfig


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
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = _known_names(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"expected one of {', '.join(known)}"
        return f"unknown setting {name}; {hint}"
    if problem["type"] == "missing":
        return f"{name} is not set; it has no default"
    message = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{name}: got {problem['input']!r}, expected {message}"


def _known_names(path: list[str]) -> list[str]:
    model: type[BaseModel] = TrainConfig
    for part in path:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)
