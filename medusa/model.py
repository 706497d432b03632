"""`MedusaModel`: a base model, its heads and its draft tree, put together from a heads directory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from .adapter import ADAPTER_FOLDER, MergedAdapter
from .base_model import BaseModel, load_base_model
from .calibration import Calibration
from .checkpoint import check_base, is_merged, load_heads
from .drafter import Drafter
from .drafting import TreeKind, make_drafter
from .fingerprint import fingerprint
from .heads import Heads
from .linear import grouping_pays, pack_linears
from .linear_groups import group_linears
from .tree import DraftTree


@dataclass
class MedusaModel:
    """What `medusa.infer.generate` runs. `calibration` is None where none was saved; then `tree` is a plain chain.
    `adapter`: the one that was merged into the base (Medusa-2), None where none was."""

    base: BaseModel
    heads: Heads
    tree: DraftTree
    calibration: Calibration | None = None
    adapter: MergedAdapter | None = None

    @classmethod
    def from_pretrained(
        cls,
        heads_dir: str | Path,
        *,
        base: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "cpu",
        pack: bool = True,
        trust_remote_code: bool = False,
    ) -> MedusaModel:
        """Load a heads directory and the base model that it names (`base` overrides where that lies).

        pack: tune the linear layers on this CPU (float32 only, about two seconds), which the model then owns.
        Raises ValueError for a damaged directory, another base than the heads were trained on, or an unusable tree.
        """
        heads, info = load_heads(heads_dir)
        revision = info.base_model.revision if base is None else None
        base_model = load_base_model(
            base or info.base_model.name,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        base_model.fuse_layers(heads.config.fused_layers)
        base_fingerprint = fingerprint(base_model.model)
        check_base(info, base_fingerprint, base_model.name)
        adapter = None
        if info.adapter is None and (Path(heads_dir) / ADAPTER_FOLDER).exists():
            raise ValueError(
                f"{heads_dir}: got an adapter that config.json does not name, expected its fingerprint there; copy the "
                "heads directory whole, or remove the adapter"
            )
        if info.adapter and not is_merged(info, base_fingerprint):
            adapter = MergedAdapter(Path(heads_dir) / ADAPTER_FOLDER, info.adapter)
            adapter.merge_into(base_model.model)
        heads = heads.to(device=base_model.device, dtype=base_model.dtype).requires_grad_(False).eval()
        heads.attach_base(base_model.lm_head_weight, base_model.embedding_weight)
        calibration = _load_calibration(Path(heads_dir) / info.tree)
        tree = calibration.tree if calibration else DraftTree.chain(heads.config.num_heads)
        model = cls(base_model, heads, tree, calibration, adapter)
        model.drafter()  # a tree that does not fit the heads is refused here, not in the middle of an answer
        if pack:
            _pack(base_model, heads)
        return model

    def drafter(
        self, *, tree: TreeKind | None = None, lookup: bool | None = None, budget: int | None = None
    ) -> Drafter:
        """A new one; it follows the rows of one engine. Options: see `medusa.drafting.make_drafter`."""
        return make_drafter(self.heads, self.tree, self.calibration, tree=tree, lookup=lookup, budget=budget)


def _pack(base_model: BaseModel, heads: Heads) -> None:
    before = base_model.probe()
    group_linears(base_model.model, base_model.probe, grouping_pays)
    pack_linears(base_model.model)
    pack_linears(heads, may_round=True)
    difference = (base_model.probe() - before).abs().max().item()
    assert difference <= 1e-4 * max(1.0, before.abs().max().item()), f"packing moved the logits by {difference:.2g}"


def _load_calibration(path: Path) -> Calibration | None:
    if path.exists():
        return Calibration.load(path)
    warnings.warn(
        f"{path} is missing: drafting a plain chain, which accepts less than a computed tree; run `medusa calibrate`",
        stacklevel=3,
    )
    return None
