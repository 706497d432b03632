"""`medusa inspect run`: a run's settings, data, speed and accuracy in a terminal. Only prints; see run_report.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .run_report import Record, RunReport

MAX_EVALUATIONS = 12  # rows of the table; more are thinned out, the first, the best and the last kept
SETTINGS = (
    "model.dtype", "heads.num_heads", "heads.num_layers", "heads.lm_head", "heads.draft_vocab_size", "loss.objective",
    "optim.lr", "optim.batch_size", "optim.gradient_accumulation", "optim.epochs", "data.max_length",
    "train.cache_hidden_states", "train.time_limit_s",
)  # fmt: skip


def show_run(report: RunReport, console: Console) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    for name, value in _facts(report):
        facts.add_row(name, Text(value))  # as it is: brackets are no markup
    console.print(facts)
    if heads := _heads_table(report):
        console.print(heads)
    if report.evaluations:
        console.print(_evaluations_table(report))


def _facts(report: RunReport) -> Iterator[tuple[str, str]]:
    yield "run", str(report.folder)
    yield "status", report.status
    record = report.record
    if record:
        base = record.base_model
        at = f" at {base['revision']}" if base["revision"] else ""
        yield "base model", f"{base['name']}{at} ({base['fingerprint'][:12]})"
        data = record.data
        counts = (
            f"{data['conversations']:,} conversations, {data['tokens']:,} tokens, {data['loss_share']:.0%} under loss"
        )
        yield (
            "data",
            f"{', '.join(source['path'] for source in data['sources'])}: {counts}, {data['held_out']:,} held out",
        )
    yield "settings", ", ".join(f"{name}={value}" for name, value in _settings(report.config))
    if report.train:
        yield from _training(report)
    if report.best:
        best = report.best
        yield (
            "best",
            f"step {best['step']:,}: tau {best['tau_16_nodes']:.2f} (16-node tree), {best['tau_chain']:.2f} (chain)",
        )
    if record:
        last, count = record.starts[-1], len(record.starts)
        yield (
            "started",
            record.starts[0].time + (f", {count - 1} continuation(s), last {last.time}" if count > 1 else ""),
        )
        processes = f", {last.num_processes} processes" if last.num_processes > 1 else ""
        yield (
            "made with",
            f"torch {last.versions['torch']} on {last.device}{processes}, commit {last.git_commit or 'none'}",
        )
        yield "command", last.command


def _settings(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in SETTINGS:
        section, key = name.split(".")
        if (value := config.get(section, {}).get(key)) is not None:
            yield name, value


def _training(report: RunReport) -> Iterator[tuple[str, str]]:
    first, last = report.train[0], report.train[-1]
    yield (
        "trained",
        f"{last['step']:,} steps, {last['tokens']:,} tokens, {last['labels']:,} labels, {last['seconds']:,.0f} s",
    )
    yield "loss", f"{first['loss']:.3f} (step {first['step']:,}) to {last['loss']:.3f} (step {last['step']:,})"
    speed = report.speed()
    parts = [f"{speed['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in speed:
        parts.append(f"MFU {speed['mfu']:.1%}")
    if "share_of_forward" in speed:
        parts.append(f"{speed['share_of_forward']:.2f} of the base's bare forward")
    if "peak_memory_bytes" in speed:
        parts.append(f"peak memory {speed['peak_memory_bytes'] / 1e9:.1f} GB")
    yield "speed", ", ".join(parts)


def _heads_table(report: RunReport) -> Table | None:
    """Accuracy by head: of the kept heads on held-out data, else of the last training steps."""
    source, what = (
        (report.best, "held out") if report.best else (report.train[-1] if report.train else None, "training")
    )
    if source is None:
        return None
    table = Table(title=f"by head, {what}, step {source['step']:,}", title_justify="left", header_style="bold")
    for heading in ("head", "top-1", "top-5", "top-10", "loss"):
        table.add_column(heading, justify="right")
    columns = [source[name] for name in ("head_top1", "head_top5", "head_top10", "head_loss")]
    for head, (top1, top5, top10, loss) in enumerate(zip(*columns, strict=True)):
        table.add_row(str(head), f"{top1:.1%}", f"{top5:.1%}", f"{top10:.1%}", f"{loss:.3f}")
    return table


def _evaluations_table(report: RunReport) -> Table:
    table = Table(title="evaluations, held out", title_justify="left", header_style="bold")
    for heading in ("step", "tau, 16 nodes", "tau, chain", "top-1 by head"):
        table.add_column(heading, justify="right")
    for record in _thinned(report.evaluations, report.best):
        is_best = record is report.best
        taus = (f"{record['tau_16_nodes']:.2f}", f"{record['tau_chain']:.2f}")
        accuracy = "  ".join(f"{share:.1%}" for share in record["head_top1"])
        label = f"{'best > ' if is_best else ''}{record['step']:,}"
        table.add_row(label, *taus, accuracy, style="bold green" if is_best else None)
    return table


def _thinned(evaluations: list[Record], best: Record | None) -> list[Record]:
    last = len(evaluations) - 1
    if last < MAX_EVALUATIONS:
        return evaluations
    kept = {round(last * i / (MAX_EVALUATIONS - 1)) for i in range(MAX_EVALUATIONS)}
    return [record for i, record in enumerate(evaluations) if i in kept or record is best]
