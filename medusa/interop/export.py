"""`medusa export`: one engine's files, read again by its rules before they appear, and a card that says what they
are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..base_model import load_base_model
from ..calibration import Calibration
from ..checkpoint import check_base, is_merged, load_heads
from ..fingerprint import fingerprint
from .engine import Source
from .engines import ENGINES
from .model_card import CARD_FILE, model_card
from .output import MAX_SHARD_BYTES, new_folder


@dataclass(frozen=True)
class Export:
    """folder: what was written. notes: what there is to say about the conversion."""

    folder: Path
    versions: str
    num_bytes: int
    notes: list[str]


def export_heads(
    folder: str | Path,
    engine_name: str,
    out: str | Path,
    *,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    repo_id: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Export:
    """Write the heads in `folder` to `out`, new or empty, as an engine loads them.

    base: where the base lies, or under which name the engine shall load it; None: as the heads say. dtype: of the
    tensors, None: the heads' own. repo_id: of the Hub repository that they are for. Raises ValueError for heads that
    the engine cannot run as they are, with the reason and an alternative; `out` is untouched then.
    """
    if engine_name not in ENGINES:
        raise ValueError(f"export: got the engine {engine_name!r}, expected one of {', '.join(ENGINES)}")
    engine, folder, out = ENGINES[engine_name], Path(folder), Path(out)
    heads, info = load_heads(folder)
    engine.check(heads.config)
    dtype = dtype or heads.dtype
    base_model = load_base_model(
        base or info.base_model.name,
        dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,  # those two have one fingerprint
        revision=info.base_model.revision if base is None else None,
        trust_remote_code=trust_remote_code,
    )
    base_fingerprint = fingerprint(base_model.model)
    check_base(info, base_fingerprint, base_model.name)
    if info.adapter and engine_name != "hf" and not is_merged(info, base_fingerprint):
        raise ValueError(
            f"{engine.title}: got heads for a base with an adapter (Medusa-2), expected that base merged, which the "
            "engine must serve; give --base DIR, the `merged` directory that `medusa train` wrote"
        )
    if base is not None:
        info = replace(info, base_model=replace(info.base_model, name=base, revision=None))
    calibration = Calibration.load(folder / info.tree) if (folder / info.tree).exists() else None
    source = Source(folder, out, heads, info, base_model, dtype, calibration, max_shard_bytes, repo_id)
    with new_folder(out) as unfinished:
        notes = conversion_notes(source, engine_name) + engine.write(source, unfinished)
        engine.validate(unfinished)
        card = model_card(source, engine, notes)
        (unfinished / CARD_FILE).write_text(card, encoding="utf-8")
        num_bytes = sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    return Export(out, engine.versions, num_bytes, notes)


def conversion_notes(source: Source, engine_name: str) -> list[str]:
    """What becomes of shared projections, a pruned vocabulary and the tree, and what that costs."""
    config = source.config
    notes: list[str] = []
    if engine_name in ("hf", "medusa-v2"):
        return notes
    num_projections = config.num_heads
    if config.lm_head == "shared" and engine_name == "vllm":
        num_projections = 1
    if config.lm_head == "shared" and engine_name == "tgi" and not config.draft_vocab_size and config.num_layers == 1:
        num_projections = 0
    megabytes = num_projections * config.vocab_size * config.hidden_size * source.dtype.itemsize / 1e6
    if config.draft_vocab_size:
        notes.append(
            f"draft vocabulary of {config.draft_vocab_size:,} widened to {config.vocab_size:,} tokens, those outside "
            f"never a head's first guess: {num_projections} projection(s), {megabytes:,.1f} MB"
        )
    elif config.lm_head == "shared" and num_projections:
        notes.append(f"the base's lm_head is written {num_projections} time(s), {megabytes:,.1f} MB")
    if engine_name == "medusa-v1":
        notes.append("it drafts a tree of its own for 4 heads or more, unless given medusa_choices (see `tree.json`)")
    elif source.calibration and engine_name != "trtllm":
        notes.append("this engine drafts chains; the tree is left out, and fewer tokens are accepted a step")
    return notes
