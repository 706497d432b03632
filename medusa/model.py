"""`MedusaModel`: a base model, its heads and its draft tree, put together from a heads directory."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from .adapter import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS, MergedAdapter
from .base_model import BaseModel, load_base_model
from .calibration import Calibration
from .checkpoint import CONFIG_FILE, WEIGHTS_FILE, check_base, is_merged, load_heads, write_atomically
from .drafter import Drafter
from .drafting import TreeKind, make_drafter
from .fingerprint import fingerprint
from .heads import Heads
from .hub import find_heads
from .linear import grouping_pays, pack_linears
from .linear_groups import group_linears
from .tree import DraftTree


@dataclass
class MedusaModel:
    """What `medusa.infer.generate` runs. `calibration` is None where none was saved; then `tree` is a plain chain.
    `adapter`: the one that was merged into the base (Medusa-2), None where none was. `heads_dir`: where the heads were
    loaded from."""

    base: BaseModel
    heads: Heads
    tree: DraftTree
    calibration: Calibration | None = None
    adapter: MergedAdapter | None = None
    heads_dir: Path | None = None

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
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> MedusaModel:
        """Load heads, of a directory or of the Hub repository `owner/name`, and the base model that they name (`base`
        overrides where that lies).

        revision: of the heads' repository; the base's own is on record in it. token: for the Hub, where the saved one
        is not meant. local_files_only: fetch nothing, as HF_HUB_OFFLINE=1 does. trust_remote_code: run code that comes
        with the base; none ever comes with heads.
        pack: tune the linear layers on this CPU (float32 only, about two seconds), which the model then owns.
        Raises ValueError for a damaged directory, another base than the heads were trained on, or an unusable tree.
        """
        heads_dir = find_heads(heads_dir, revision=revision, token=token, local_files_only=local_files_only)
        heads, info = load_heads(heads_dir)
        base_model = load_base_model(
            base or info.base_model.name,
            dtype=dtype,
            device=device,
            revision=info.base_model.revision if base is None else None,
            trust_remote_code=trust_remote_code,
            token=token,
            local_files_only=local_files_only,
        )
        base_model.fuse_layers(heads.config.fused_layers)
        base_fingerprint = fingerprint(base_model.model)
        check_base(info, base_fingerprint, base_model.name)
        adapter = None
        if info.adapter is None and (heads_dir / ADAPTER_FOLDER).exists():
            raise ValueError(
                f"{heads_dir}: got an adapter that config.json does not name, expected its fingerprint there; copy the "
                "heads directory whole, or remove the adapter"
            )
        if info.adapter and not is_merged(info, base_fingerprint):
            adapter = MergedAdapter(heads_dir / ADAPTER_FOLDER, info.adapter)
            adapter.merge_into(base_model.model)
        heads = heads.to(device=base_model.device, dtype=base_model.dtype).requires_grad_(False).eval()
        heads.attach_base(base_model.lm_head_weight, base_model.embedding_weight)
        calibration = _load_calibration(heads_dir / info.tree)
        tree = calibration.tree if calibration else DraftTree.chain(heads.config.num_heads)
        model = cls(base_model, heads, tree, calibration, adapter, heads_dir)
        model.drafter()  # a tree that does not fit the heads is refused here, not in the middle of an answer
        if pack:
            _pack(base_model, heads)
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Copy the heads directory that this was loaded from to `folder`, bit for bit, with the tree as it is now.

        Raises ValueError for a model that was put together by hand: use `medusa.checkpoint.save_heads`.
        """
        if self.heads_dir is None:
            raise ValueError("save_pretrained: got heads that no directory was loaded for; use checkpoint.save_heads")
        source, folder = self.heads_dir, Path(folder)
        if folder.resolve() == source.resolve():
            raise ValueError(f"save_pretrained: got {folder}, where the heads were loaded from; give another directory")
        names = [Path(CONFIG_FILE), Path(WEIGHTS_FILE)]
        if (source / ADAPTER_FOLDER).exists():
            names += [Path(ADAPTER_FOLDER) / name for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically({folder / name: partial(shutil.copyfile, source / name) for name in names})
        if self.calibration:
            self.calibration.save(folder / load_heads(source)[1].tree)

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
