"""How good the heads are on held-out conversations while they are trained, and which heads of a run are kept.

What counts in decoding is the mean acceptance length, so the best heads are those of the evaluation with the highest
simulated tau of a 16-node tree, not those with the lowest loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa.acceptance_statistics import AcceptanceStatistics, best_tree
from medusa.checkpoint import write_atomically
from medusa.tree import DraftTree

from .labels import full_positions, label_positions
from .metrics import base_metrics, head_metrics
from .step import Forward, Run, forward, zero_base_sums, zero_sums

MAX_RANK = 32
NUM_NODES = 16


def evaluate(run: Run) -> dict[str, Any] | None:
    """Metrics of the heads on the held-out examples, over all processes, also written to the metrics file: those of
    `head_metrics`, `tau_chain`, `tau_16_nodes`, and both by category where the data has categories."""
    if not run.held_out:
        return None
    size = run.config.optim.batch_size * run.processes.world_size
    categories = sorted({run.examples[i].category or "" for i in run.held_out})
    sums, base_sums, ranks = zero_sums(run), zero_base_sums(run), []
    for start in range(0, len(run.held_out), size):
        with torch.no_grad():
            result = forward(run, run.held_out[start : start + size])
        sums += result.scores.sums
        base_sums += result.base_sums
        ranks.append(_decoded_ranks(run, result, categories))
    means = head_metrics(run.processes.reduce(sums)) | base_metrics(run.processes.reduce(base_sums))
    metrics = means | _taus(run, torch.cat(ranks), categories)
    if run.metrics:
        run.metrics.write({"kind": "eval", "step": run.state.counters.step, **metrics})
    return metrics


def keep_best(run: Run, metrics: dict[str, Any] | None) -> None:
    """Save the heads as they are if none before had a higher tau; of equal ones the later, which have learnt more."""
    if metrics is None:
        return
    counters = run.state.counters
    tau = metrics["tau_16_nodes"]
    counters.evaluations_since_best = 0 if tau > counters.best_tau else counters.evaluations_since_best + 1
    if tau >= counters.best_tau:
        counters.best_tau, counters.best_step = tau, counters.step
        if run.processes.is_main:
            tensors = run.state.tensors()
            metadata = {"metrics": json.dumps(metrics)}
            write_atomically({_best_file(run): lambda file: save_file(tensors, file, metadata=metadata)})


def restore_best(run: Run) -> dict[str, Any] | None:
    """Put the best heads in place of the last ones. Returns their metrics; None where nothing was held out."""
    run.processes.barrier()
    if run.state.counters.best_step == 0:
        return None
    path = _best_file(run)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metrics: dict[str, Any] = json.loads(file.metadata()["metrics"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: got a file that does not hold the best heads of the run ({error}); delete "
            f"{run.checkpoint.parent} to start over"
        ) from error
    run.state.load_tensors(tensors)
    return metrics


def _best_file(run: Run) -> Path:
    return run.checkpoint.with_name("best.safetensors")


def _decoded_ranks(run: Run, result: Forward, categories: list[str]) -> Tensor:
    """int64 [m, 1 + K]: category and ranks of this process's positions that are like those of decoding."""
    num_heads = run.config.heads.num_heads
    if result.batch is None:
        return torch.empty(0, 1 + num_heads, dtype=torch.int64, device=run.processes.device)
    mask = result.batch.loss_mask
    numbers = [categories.index(run.examples[i].category or "") for i in result.indices]
    per_row = label_positions(mask, num_heads).sum(dim=1)
    category = torch.tensor(numbers, device=mask.device).repeat_interleave(per_row)
    return torch.cat([category[:, None], result.scores.ranks], dim=1)[full_positions(mask, num_heads)]


def _taus(run: Run, ranks: Tensor, categories: list[str]) -> dict[str, Any]:
    ranks = run.processes.gather(ranks).cpu()
    taus = _tau(ranks[:, 1:])
    if categories != [""]:
        parts = {name or "none": _tau(ranks[ranks[:, 0] == i, 1:]) for i, name in enumerate(categories)}
        return {**taus, "by_category": parts}
    return taus


def _tau(ranks: Tensor) -> dict[str, float]:
    statistics = AcceptanceStatistics(ranks.shape[1], MAX_RANK)
    statistics.update(ranks)
    return {
        "tau_chain": statistics.expected_length(DraftTree.chain(statistics.num_heads)),
        "tau_16_nodes": statistics.expected_length(best_tree(statistics, NUM_NODES)),
    }
