"""How good heads are on held-out text: the rank of each true token in each head's list, counted jointly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa.acceptance_statistics import AcceptanceStatistics, best_tree, true_ranks
from medusa.base_model import BaseModel
from medusa.heads import Heads
from medusa.heads_drafter import HeadGuesses
from medusa.model import MedusaModel
from medusa.temperature import TemperatureFit
from medusa.tree import DraftTree

from .progress import token_progress

MAX_RANK = 32
ROWS = 512
PLAUSIBLE = 4


class LabelledText(Protocol):
    """A conversation as the data side hands it over: int64 [T], bool [T]."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def category(self) -> str | None: ...


@dataclass(frozen=True)
class Evaluation:
    """statistics: all positions. by_category: the same, split, where the data has categories."""

    statistics: AcceptanceStatistics
    by_category: dict[str, AcceptanceStatistics]

    def to_dict(self, tree: DraftTree | None = None) -> dict[str, Any]:
        """JSON-ready: accuracy per head, simulated tau of a chain, of the best 16-node tree and of `tree`."""
        report = _report(self.statistics, tree)
        report["by_category"] = {name: _report(part, tree) for name, part in sorted(self.by_category.items())}
        return report


def evaluate(
    base_model: BaseModel,
    heads: Heads,
    texts: Sequence[LabelledText],
    *,
    on_text: Callable[[int], None] | None = None,
    fits: Sequence[TemperatureFit] | None = None,
) -> Evaluation:
    """Ranks at every position whose next K + 1 tokens are all the assistant's, each head below the true tokens.

    fits: one a head, to collect what its temperature follows from. Raises ValueError if there is no such position.
    """
    statistics = AcceptanceStatistics(heads.config.num_heads, MAX_RANK)
    by_category: dict[str, AcceptanceStatistics] = {}
    for text in texts:
        ranks = _ranks(base_model, heads, text, fits)
        statistics.update(ranks)
        if text.category:
            new = AcceptanceStatistics(heads.config.num_heads, MAX_RANK)
            by_category.setdefault(text.category, new).update(ranks)
        if on_text:
            on_text(len(text.input_ids))
    if not statistics.num_positions:
        raise ValueError(
            f"evaluation: none of {len(texts)} conversations has {heads.config.num_heads + 1} answer tokens in a row; "
            "give longer answers"
        )
    return Evaluation(statistics, by_category)


def evaluate_with_progress(
    model: MedusaModel,
    texts: Sequence[LabelledText],
    console: Console,
    fits: Sequence[TemperatureFit] | None = None,
) -> Evaluation:
    with token_progress(console, "held out", len(texts), "conversations") as progress:
        return evaluate(model.base, model.heads, texts, on_text=lambda n: progress.advance(1, tokens=n), fits=fits)


def print_evaluation(evaluation: Evaluation, tree: DraftTree | None, console: Console) -> None:
    """A row a head for all positions; a line of tau for all and for each category."""
    report = evaluation.to_dict(tree)
    table = Table(title=f"{report['num_positions']:,} positions")
    for column in ("head", "guesses token", "top 1", "top 5", "top 10"):
        table.add_column(column, justify="right")
    for k, accuracy in enumerate(report["accuracy"]):
        table.add_row(str(k), f"t + {k + 2}", *(f"{share:.1%}" for share in accuracy.values()))
    console.print(table)
    for name, part in {"all": report, **report["by_category"]}.items():
        taus = {"chain": "tau_chain", "best 16-node tree": "tau_16_nodes", "saved tree": "tau_tree"}
        shown = ", ".join(f"{label} {part[key]:.2f}" for label, key in taus.items() if key in part)
        console.print(f"tau, {name}: {shown}", highlight=False)


@torch.inference_mode()
def _ranks(base_model: BaseModel, heads: Heads, text: LabelledText, fits: Sequence[TemperatureFit] | None) -> Tensor:
    """int64 [n, K]."""
    ids = text.input_ids.to(base_model.device)
    hidden = heads.fuse(base_model.hidden_states(ids[None], torch.ones_like(ids[None]))[0])
    num_heads = heads.config.num_heads
    positions = full_positions(text.loss_mask, num_heads).to(ids.device)
    to_draft = _draft_index(heads, ids)
    ranks = positions.new_empty(len(positions), num_heads)
    for start in range(0, len(positions), ROWS):
        rows, found = positions[start : start + ROWS], ranks[start : start + ROWS]
        guesses = HeadGuesses(heads, hidden[rows])
        for k in range(num_heads):
            logits = guesses.logits(k, ids[rows[:, None, None] + 1 + torch.arange(k + 1, device=ids.device)])[:, 0]
            targets = to_draft[rows + k + 2]
            found[:, k] = true_ranks(logits, targets, MAX_RANK)
            if fits:
                # A head is only asked below guesses that might be right: elsewhere it may be as sure as it likes.
                asked = (found[:, :k] < PLAUSIBLE).all(dim=1)
                fits[k].update(logits[asked], targets[asked])
    return ranks


def full_positions(loss_mask: Tensor, num_heads: int) -> Tensor:
    """Positions t whose tokens t + 1 .. t + K + 1 are all under loss."""
    length = len(loss_mask) - num_heads - 1
    if length <= 0:
        return torch.empty(0, dtype=torch.int64)
    windows = loss_mask.unfold(0, num_heads + 1, 1).all(dim=1)  # [T - K], window i is i .. i + K
    return windows[1 : length + 1].nonzero().flatten()


def _draft_index(heads: Heads, ids: Tensor) -> Tensor:
    """Each token's index in the heads' vocabulary, -1 where it has none."""
    if heads.draft_token_ids is None:
        return ids
    index = torch.searchsorted(heads.draft_token_ids, ids).clamp_(max=len(heads.draft_token_ids) - 1)
    return torch.where(heads.draft_token_ids[index] == ids, index, -1)


def _report(statistics: AcceptanceStatistics, tree: DraftTree | None) -> dict[str, Any]:
    accuracy = statistics.accuracy_by_rank().cumsum(dim=1)
    report: dict[str, Any] = {
        "num_positions": statistics.num_positions,
        "accuracy": [{f"top{n}": round(float(row[n - 1]), 4) for n in (1, 5, 10)} for row in accuracy],
        "tau_chain": statistics.expected_length(DraftTree.chain(statistics.num_heads)),
        "tau_16_nodes": statistics.expected_length(best_tree(statistics, 16)),
    }
    if tree is not None:
        report["tau_tree"] = statistics.expected_length(tree)
    return report
