"""What every engine's file can hold: independent heads over the whole vocabulary. And our heads to it and back.

A pruned vocabulary is widened: a token that the heads cannot guess gets the mean of the rows of those they can. Its
logit is then the mean of theirs, whatever the state, and a mean is never the greatest of what it is the mean of. (There
is no bias to be set to -inf; rows of zeros would win wherever all guesses are negative.) Guesses beyond the first are
not certain to stand above a mean, so `check_fill` looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import HeadsConfig
from ..heads import Heads, MedusaHeads

NUM_PROBES = 64
METADATA_PREFIX = "medusa_decoding."

Block = tuple[Tensor, Tensor]  # weight [D, D], bias [D]


@dataclass(frozen=True)
class PlainHeads:
    """blocks[k][j]: of head k, in one dtype. projections: K of [V, D], or one that all heads share, or none where the
    base's own lm_head is meant. metadata: how our heads looked, to be put beside the tensors; see `Hints`."""

    blocks: tuple[tuple[Block, ...], ...]
    projections: tuple[Tensor, ...]
    metadata: Mapping[str, str]

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    @property
    def num_layers(self) -> int:
        return len(self.blocks[0])

    @property
    def hidden_size(self) -> int:
        return int(self.blocks[0][0][0].shape[0])

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0][0][0].dtype

    def projection(self, head: int) -> Tensor:
        return self.projections[head if len(self.projections) > 1 else 0]


@dataclass(frozen=True)
class Hints:
    """What an export says about the heads it came from. Only ever a hint: `to_heads` checks it against the tensors."""

    lm_head: str | None = None
    fill_token: int | None = None  # a token outside the draft vocabulary

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> Hints:
        fill = metadata.get(f"{METADATA_PREFIX}fill_token", "")
        return cls(metadata.get(f"{METADATA_PREFIX}lm_head"), int(fill) if fill.isdecimal() else None)


def plain_heads(heads: Heads, lm_head: Tensor, dtype: torch.dtype, *, width: int = 1) -> PlainHeads:
    """Medusa heads without fused layers, in `dtype`. lm_head: the base's, [V, D]. width: guesses of a head that an
    engine looks at.

    Raises ValueError where a value has no place in `dtype`, or `check_fill` fails.
    """
    config, ids = heads.config, heads.draft_token_ids
    assert isinstance(heads, MedusaHeads) and config.design == "medusa" and not config.fused_layers
    state = heads.state_dict()
    rows = lm_head.to(dtype) if ids is None else lm_head[ids].to(dtype)
    own = [state[f"projections.{k}.weight"].to(dtype) for k in range(config.num_heads) if config.lm_head == "own"]
    blocks = tuple(
        tuple(
            (state[f"blocks.{k}.{j}.linear.weight"].to(dtype), state[f"blocks.{k}.{j}.linear.bias"].to(dtype))
            for j in range(config.num_layers)
        )
        for k in range(config.num_heads)
    )
    for tensor in [part for head in blocks for block in head for part in block] + (own or [rows]):
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"export: got values that {_short(dtype)} cannot hold; use --dtype bfloat16 or float32")
    metadata = {"format": "pt", f"{METADATA_PREFIX}lm_head": config.lm_head}
    projections = own or [rows]
    if ids is not None and len(ids) < config.vocab_size:
        metadata[f"{METADATA_PREFIX}fill_token"] = str(first_missing(ids))
        projections = [widen(weight, ids, config.vocab_size, width) for weight in projections]
    return PlainHeads(blocks, tuple(projections), metadata)


def first_missing(ids: Tensor) -> int:
    """The lowest id that ascending `ids` leave out."""
    gaps = (ids != torch.arange(len(ids))).nonzero().flatten()
    return int(gaps[0]) if len(gaps) else len(ids)


def widen(weight: Tensor, ids: Tensor, vocab_size: int, width: int) -> Tensor:
    """[n, D], rows of the tokens `ids` -> [vocab_size, D]. Raises ValueError as `check_fill`."""
    fill = weight.double().mean(dim=0).to(weight.dtype)
    check_fill(weight, fill, width)
    wide = fill.repeat(vocab_size, 1)
    wide[ids] = weight
    return wide


def check_fill(weight: Tensor, fill: Tensor, width: int) -> None:
    """That at least `width` rows of `weight` [n, D] stand above the row `fill` [D] for states of any kind, computed in
    their own dtype: random ones, and both ways along rows themselves. Raises ValueError where they do not."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(NUM_PROBES // 2, weight.shape[1], generator=generator).to(weight.dtype)
    along = weight[torch.randint(len(weight), (NUM_PROBES // 4,), generator=generator)]
    probes = torch.cat([random, along, -along])
    above = int((probes @ weight.T > (probes @ fill)[:, None]).sum(dim=1).min())
    if above < width:
        raise ValueError(
            f"export: got a draft vocabulary of {len(weight)} tokens whose best {width} guesses are not all certain to "
            f"stand above the tokens outside it (only {above}); give --dtype float32, or train with "
            "heads.draft_vocab_size=null"
        )


def to_heads(
    plain: PlainHeads, lm_head: Tensor, *, draft_token_ids: Tensor | None = None
) -> tuple[MedusaHeads, list[str]]:
    """Our heads, and what there is to say about them. lm_head: the base's, [V, D]. draft_token_ids: ascending, where
    the projections have rows for these alone.

    Projections that are the base's lm_head bit for bit become shared ones. Raises ValueError for a vocabulary that is
    not the base's.
    """
    hints, notes = Hints.read(plain.metadata), []
    vocab_size, ids, projections = len(lm_head), draft_token_ids, list(plain.projections)
    if lm_head.shape[1] != plain.hidden_size:
        raise ValueError(
            f"import: got heads of hidden size {plain.hidden_size}, expected the base's {lm_head.shape[1]}; give the "
            "base that they were trained on with --base"
        )
    if ids is not None and int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"import: got a token_map up to token {int(ids[-1])}, expected ids below {vocab_size}, the base's"
        )
    for weight in projections:
        if len(weight) != (vocab_size if ids is None else len(ids)):
            raise ValueError(
                f"import: got projections to {len(weight):,} tokens, expected the base's {vocab_size:,}; give the base "
                "that they were trained on with --base"
            )
    if ids is None and projections and hints.fill_token is not None:
        ids = narrow(projections, hints.fill_token)
        projections = [weight[ids] for weight in projections]
    rows = (lm_head if ids is None else lm_head[ids]).to(plain.dtype)
    is_base = all(torch.equal(weight, rows) for weight in projections)
    shared = is_base and hints.lm_head != "own"
    if not is_base:
        what = "the projections differ from the base's lm_head, though they were exported as shared: kept as own"
        notes += [what] if hints.lm_head == "shared" else []
    if not shared and len(projections) == 1 < plain.num_heads:
        notes.append(f"one projection shared by all heads is not the base's lm_head: copied {plain.num_heads} times")
        projections *= plain.num_heads
    config = HeadsConfig(
        plain.num_heads, plain.num_layers, plain.hidden_size, vocab_size,
        "shared" if shared else "own", None if ids is None else len(ids),
    )  # fmt: skip
    heads = MedusaHeads(config, ids).to(plain.dtype)
    heads.load_state_dict(_state(plain, [] if shared else projections, ids), strict=True)
    return heads, notes


def narrow(projections: Sequence[Tensor], fill_token: int) -> Tensor:
    """int64 [n], ascending: tokens whose row is not that of `fill_token`, in any of the projections [V, D]."""
    if not 0 <= fill_token < len(projections[0]):
        raise ValueError(f"import: got fill_token {fill_token}, expected a token id below {len(projections[0])}")
    differs = torch.stack([(weight != weight[fill_token]).any(dim=1) for weight in projections]).any(dim=0)
    ids = differs.nonzero().flatten()
    if not len(ids):
        raise ValueError("import: got projections whose rows are all the same; these heads can guess nothing")
    return ids


def _state(plain: PlainHeads, projections: Sequence[Tensor], ids: Tensor | None) -> dict[str, Tensor]:
    state = {} if ids is None else {"draft_token_ids": ids}
    for k, head in enumerate(plain.blocks):
        for j, (weight, bias) in enumerate(head):
            state |= {f"blocks.{k}.{j}.linear.weight": weight, f"blocks.{k}.{j}.linear.bias": bias}
    return state | {f"projections.{k}.weight": weight for k, weight in enumerate(projections)}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
