"""Medusa-2: the base adapted by LoRA together with the heads (Cai et al., 2024, section 2.2.2).

The objective is L_base + lambda_0 * sum_k decay^k L_k. The heads' own gradients are those of Medusa-1; lambda_0 weighs
what their loss does to the base, and rises from 0 so that untrained heads do not pull the base about. One backward
pass through the base per batch, however many heads: theirs meet in the hidden states first.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa.adapter import adapter_fingerprint, import_peft, merge
from medusa.base_model import BaseModel
from medusa.checkpoint import AdapterReference
from medusa.fingerprint import fingerprint

from .batching import Batch
from .config import JointConfig
from .labels import label_positions, next_labels
from .targets import Targets, Teacher


@dataclass
class Adapter:
    """LoRA layers inside the base's own modules. `peft_model`: peft's wrapper around the same model."""

    peft_model: Any

    @classmethod
    def attach(cls, base: BaseModel, settings: JointConfig, seed: int) -> Adapter:
        """Adds float32 LoRA layers to `base.model` that change nothing until trained. Raises ValueError for modules
        that the base does not have."""
        peft = import_peft()
        modules = settings.target_modules
        config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=modules if isinstance(modules, str) else list(modules),
            lora_dropout=0.0,  # a resumed run would need the generator's state
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                model = peft.get_peft_model(base.model, config)
            except (ValueError, re.error) as error:
                raise ValueError(f"joint.target_modules: got {modules!r}, which peft cannot adapt: {error}") from error
        _check_adapted(base, model, modules)
        return cls(model)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.peft_model.named_parameters() if p.requires_grad)

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        parameters = dict(self.named_parameters())
        assert parameters.keys() == tensors.keys()
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])

    def save(self, folder: Path) -> None:
        """As a peft checkpoint, whole or not at all."""
        unfinished = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        self.peft_model.save_pretrained(str(unfinished))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    def detach(self) -> None:
        """Take the layers out of the base, which is then as it was. Save them before."""
        self.peft_model.unload()


def _check_adapted(base: BaseModel, peft_model: Any, modules: str | list[str]) -> None:
    adapted: list[str] = peft_model.base_model.targeted_module_names
    ends = (base.model.get_input_embeddings(), base.model.get_output_embeddings())
    if any(hasattr(module, "lora_A") for module in ends):
        raise ValueError(
            f"joint.target_modules: got {modules!r}, which adapts the base's embeddings or its lm_head, expected "
            "layers between them, such as all-linear; heads multiply by the lm_head as it was"
        )
    for name in [] if isinstance(modules, str) else modules:
        if not any(module == name or module.endswith(f".{name}") for module in adapted):
            raise ValueError(f"joint.target_modules: got {name!r}, expected names of the base's linear layers")


@dataclass(frozen=True)
class Joint:
    """The base's side of the objective. `teacher`: the base's own lm_head as it was, where the base is kept to what
    it said before (base_loss: self); None: to the data."""

    base: BaseModel
    adapter: Adapter
    settings: JointConfig
    num_heads: int
    chunk_size: int
    teacher: Teacher | None

    def base_loss(self, hidden: Tensor, batch: Batch, weight: float) -> Tensor:
        """float64 [2]: sum of the base's losses at its own next tokens, and how many. hidden: [n, D], a leaf whose
        gradient takes `weight` times theirs, unless no_grad."""
        labels = next_labels(batch.input_ids, batch.loss_mask, self.num_heads)
        rows = (labels >= 0).nonzero().squeeze(1)
        targets = Targets.one_hot(labels[rows]) if self.teacher is None else self._before(batch, rows)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(rows), self.chunk_size):
            part = slice(start, start + self.chunk_size)
            logits = self.base.logits(hidden[rows[part]]).float()
            ids, probs = targets.ids[part], targets.probs[part]
            loss = -(probs * F.log_softmax(logits, dim=-1).gather(1, ids)).sum()
            if torch.is_grad_enabled():
                (weight * loss).backward()
            total += loss.detach()
        return torch.stack([total, total.new_tensor(len(rows))])

    def _before(self, batch: Batch, rows: Tensor) -> Targets:
        """What the base expected at `rows` before it was adapted."""
        assert self.teacher is not None
        with torch.no_grad(), self.adapter.peft_model.disable_adapter():
            states = self.base.hidden_states(batch.input_ids, batch.attention_mask)
        return self.teacher.targets(states[label_positions(batch.loss_mask, self.num_heads)][rows], self.chunk_size)


def merge_saved(base: BaseModel, folder: Path, merged: Path | None) -> AdapterReference:
    """Merge the adapter saved in `folder` into the (detached) base, and write that as an ordinary model into `merged`,
    unless None."""
    merge(folder, base.model)
    if merged:
        unfinished = merged.with_name(f".{merged.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        base.model.save_pretrained(str(unfinished))
        base.tokenizer.save_pretrained(str(unfinished))
        shutil.rmtree(merged, ignore_errors=True)
        unfinished.rename(merged)
    return AdapterReference(adapter_fingerprint(folder), fingerprint(base.model))
