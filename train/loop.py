"""The training loop: the same for one process and for many, for hidden states computed now or read from disk.

Gradients are sums until the step: they are added up over micro-batches and processes, then divided by the number of
labels in all of them, so any split of a batch gives the same step. The base is no part of this; it only fed `source`.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from .evaluation import evaluate, keep_best
from .loss import LABELS, LOSS, head_weights
from .metrics import base_metrics, head_metrics
from .schedule import learning_rates, ramp
from .signals import StopSignals, TrainingInterrupted
from .state import Window, save_state
from .step import Run, forward, zero_base_sums, zero_sums


class NonFiniteLoss(RuntimeError):
    """A loss or gradient that is no number; the optimizer has not stepped."""


def train_loop(run: Run) -> None:
    """Trains until the run is over. Raises NonFiniteLoss, and TrainingInterrupted after a signal, its state saved."""
    counters, every = run.state.counters, run.config.train
    with StopSignals() as signals:
        while counters.stop_reason is None:
            began = time.perf_counter()
            progress = _progress(run)
            rates = learning_rates(run.config, progress)
            sums, base_sums, tokens = _accumulate(run, ramp(run.config.joint, progress))
            norm = _optimize(run, sums, rates)
            counters.step += 1
            stop = _share_clock(run, time.perf_counter() - began, signals.received)
            _count(run, sums, base_sums, tokens)
            counters.stop_reason = _stop_reason(run)
            if counters.step % every.log_every == 0 or counters.stop_reason:
                _log(run, rates, norm)
            if counters.stop_reason or (every.eval_every and counters.step % every.eval_every == 0):
                keep_best(run, evaluate(run))
                counters.stop_reason = _stop_reason(run)
            if stop or counters.stop_reason or counters.step % every.save_every == 0:
                _save(run)
            if stop and not counters.stop_reason:
                raise TrainingInterrupted(
                    f"stopped at step {counters.step} of {run.plan.total_steps}, saved in {run.checkpoint}; "
                    "run the same command again to continue"
                )


def _accumulate(run: Run, ramp: float) -> tuple[Tensor, Tensor, int]:
    """Adds one step's gradients up on this process. Returns the heads' and the base's sums over all processes, and all
    the batch's tokens."""
    for parameter in run.state.parameters():
        # Zeros rather than None: a process without examples takes part in the reduction all the same.
        parameter.grad = torch.zeros_like(parameter)
    sums, base_sums, tokens = zero_sums(run), zero_base_sums(run), 0
    for batch in run.plan.batches(run.state.counters.step):
        result = forward(run, batch, ramp)
        sums += result.scores.sums
        base_sums += result.base_sums
        tokens += sum(len(run.examples[i]) for i in batch)
    return run.processes.reduce(sums), run.processes.reduce(base_sums), tokens


def _optimize(run: Run, sums: Tensor, rates: dict[str, float]) -> float | None:
    """Steps on the mean over all labels. Returns the gradient's norm before clipping; None if there were no labels."""
    labels, optimizer = sums[:, LABELS].sum().item(), run.state.optimizer
    if labels == 0:
        run.state.counters.empty_steps += 1
        return None
    norm = optimizer.take_gradients(labels)
    loss = _mean_loss(run, sums)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        _stop_at_non_finite(run, loss, norm)
    for group in optimizer.param_groups:
        group["lr"] = rates[group["part"]]
    optimizer.step()
    return norm


def _stop_at_non_finite(run: Run, loss: float, norm: float) -> None:
    step = run.state.counters.step
    examples = [i for batch in run.plan.batches(step) for i in batch]
    shown = ", ".join(map(str, examples[:32])) + (f" and {len(examples) - 32} more" if len(examples) > 32 else "")
    raise NonFiniteLoss(
        f"got loss {loss} and gradient norm {norm} at epoch {run.plan.epoch(step)}, step {step} (examples {shown}), "
        "expected finite numbers; stopped before the optimizer step. Try a lower optim.lr or model.dtype=float32"
    )


def _progress(run: Run) -> float:
    """Share of the run that is done in the middle of this step: by steps, or by the time limit if that is nearer."""
    counters, limit = run.state.counters, run.config.train.time_limit_s
    by_time = counters.seconds / limit if limit else 0.0
    return min(1.0, max((counters.step + 0.5) / run.plan.total_steps, by_time))


def _stop_reason(run: Run) -> str | None:
    counters, limit = run.state.counters, run.config.train.time_limit_s
    if counters.step >= run.plan.total_steps:
        return "all steps done"
    if limit and counters.seconds >= limit:
        return "time limit"
    patience = run.config.train.patience
    if patience and counters.evaluations_since_best >= patience:
        return f"tau has not risen for {patience} evaluations"
    return None


def _share_clock(run: Run, seconds: float, signalled: bool) -> bool:
    """The first process's clock, and whether any has been signalled, so that all take the same decisions."""
    own_seconds = seconds if run.processes.is_main else 0.0
    shared = torch.tensor([own_seconds, float(signalled)], dtype=torch.float64, device=run.processes.device)
    seconds, num_signalled = run.processes.reduce(shared).tolist()
    run.state.counters.seconds += seconds
    run.state.window.seconds += seconds
    return num_signalled > 0


def _count(run: Run, sums: Tensor, base_sums: Tensor, tokens: int) -> None:
    counters, window = run.state.counters, run.state.window
    counters.tokens += tokens
    counters.labels += int(sums[:, LABELS].sum().item())
    window.sums += sums
    window.base_sums += base_sums
    window.loss += _mean_loss(run, sums)
    window.steps += bool(sums[:, LABELS].any())
    window.tokens += tokens
    loss = window.loss / max(window.steps, 1)
    speed = run.throughput.status(counters.tokens, counters.labels, counters.seconds)
    run.report(_progress(run), f"step {counters.step}/{run.plan.total_steps}, loss {loss:.3f}, {speed}")


def _log(run: Run, rates: dict[str, float], norm: float | None) -> None:
    """One line over the steps since the last: means of loss, the learning rates and gradient norm of the last."""
    counters, window = run.state.counters, run.state.window
    if run.metrics:
        run.metrics.write(
            {
                "kind": "train",
                "step": counters.step,
                "epoch": run.plan.epoch(counters.step - 1),
                "loss": window.loss / max(window.steps, 1),
                **head_metrics(window.sums),
                **base_metrics(window.base_sums),
                **{"lr" if part == "heads" else f"lr_{part}": rate for part, rate in rates.items()},
                "grad_norm": norm,
                **run.throughput.measures(window.tokens, window.sums[:, LABELS].sum().item(), window.seconds),
                "tokens": counters.tokens,
                "labels": counters.labels,
                "seconds": counters.seconds,
                "time": time.time(),
            }
        )
    run.state.window = Window(zero_sums(run), zero_base_sums(run))


def _save(run: Run) -> None:
    save_state(run.checkpoint, run.state, run.identity, writes=run.processes.is_main)
    run.processes.barrier()


def _mean_loss(run: Run, sums: Tensor) -> float:
    weights = head_weights(run.config.heads.num_heads, run.config.loss.head_decay)
    weighted = sum(weight * nll for weight, nll in zip(weights, sums[:, LOSS].tolist(), strict=True))
    return weighted / max(sums[:, LABELS].sum().item(), 1.0)
