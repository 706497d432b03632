"""What training heads costs: speed against a bare forward of the base over the same batches, and peak memory by K.

    python scripts/bench_training.py --base runs/demo-model --data data/demo.jsonl.xz --json results/training.json

Speed: 4 independent heads of 3 layers, shared lm_head, draft vocabulary of 8,192, batches of real conversations.
A training step, one on hidden states that are there already, and two bare forwards (hidden states alone, and with the
base's logits, as `model(input_ids)` computes them) take turns on each batch. Memory: resident set above the loaded
base, at its peak over training steps on batches of 8 x 512 tokens, and what of it heads and optimizer hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from medusa.base_model import BaseModel, load_base_model
from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.infer.machine import describe_machine
from medusa.train.batching import Batch, Example, batch_order, collate
from medusa.train.dataset import build_dataset, frequent_tokens
from medusa.train.features import OnlineHidden
from medusa.train.labels import draft_index, gather_labels, gather_prefix
from medusa.train.loss import LossSettings, accumulate_gradients, head_weights

DRAFT_TOKENS, NUM_LAYERS, BATCH_SIZE, CHUNK = 8192, 3, 8, 256


class Trainer:
    """One optimizer step on one batch, made of the parts that the training loop is made of."""

    def __init__(self, base: BaseModel, num_heads: int, draft_ids: torch.Tensor) -> None:
        config = HeadsConfig(
            num_heads=num_heads,
            num_layers=NUM_LAYERS,
            hidden_size=base.hidden_size,
            vocab_size=base.vocab_size,
            lm_head="shared",
            draft_vocab_size=len(draft_ids),
        )
        self.base, self.heads = base, MedusaHeads(config, draft_ids)
        self.heads.init_from_base(base.lm_head_weight, base.embedding_weight)
        self.heads.shared_projection.to(base.dtype)
        self.source = OnlineHidden(base, num_heads)
        self.base_to_draft = draft_index(draft_ids, base.vocab_size)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=1e-3)

    @property
    def state_bytes(self) -> int:
        """What the heads themselves hold: parameters, gradients and two moments, float32."""
        return 16 * sum(parameter.numel() for parameter in self.heads.parameters())

    def step(self, batch: Batch) -> None:
        self.step_on(self.source.hidden(range(len(batch.input_ids)), batch), batch)

    def step_on(self, hidden: torch.Tensor, batch: Batch) -> None:
        num_heads = self.heads.config.num_heads
        labels = gather_labels(batch.input_ids, batch.loss_mask, num_heads, self.base_to_draft)
        self.optimizer.zero_grad()
        settings = LossSettings(head_weights(num_heads, 0.8), CHUNK, compute_dtype=self.base.dtype)
        prefix = gather_prefix(batch.input_ids, batch.loss_mask, num_heads)
        accumulate_gradients(self.heads, hidden, prefix, labels, settings)
        self.optimizer.step()


def measure_speed(base: BaseModel, examples: list[Example], num_batches: int) -> dict[str, float]:
    """Tokens (without padding) a second of each way, over all batches; and the ratios of training to a forward."""
    trainer = Trainer(base, 4, frequent_tokens(examples, DRAFT_TOKENS, base.vocab_size))
    order = batch_order(len(examples), [len(example) for example in examples], BATCH_SIZE, 0, 0)[:num_batches]
    batches = [collate([examples[i] for i in indices]) for indices in order]

    @torch.no_grad()
    def forward(batch: Batch) -> None:
        base.hidden_states(batch.input_ids, batch.attention_mask)

    @torch.no_grad()
    def forward_with_logits(batch: Batch) -> None:
        base.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)

    states: dict[int, torch.Tensor] = {}  # of each batch, as if read from disk

    def cached_step(batch: Batch) -> None:
        trainer.step_on(states[id(batch)], batch)

    ways: dict[str, Callable[[Batch], None]] = {
        "training": trainer.step,
        "cached_training": cached_step,
        "forward": forward,
        "forward_with_logits": forward_with_logits,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number, batch in enumerate(batches[:1] + batches):
        states[id(batch)] = trainer.source.hidden(range(len(batch.input_ids)), batch)
        for name, way in ways.items():
            start = time.perf_counter()
            way(batch)
            if number:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
    report = {f"{name}_tokens_per_second": tokens / sum(times) for name, times in seconds.items()}
    for name in ("forward", "forward_with_logits"):
        ratios = [bare / train for bare, train in zip(seconds[name], seconds["training"], strict=True)]
        report[f"training_by_{name}"] = statistics.median(ratios)
    pairs = zip(seconds["training"], seconds["cached_training"], strict=True)
    report["cached_training_by_training"] = statistics.median(online / cached for online, cached in pairs)
    return report


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory can be measured on Linux only")


def peak_memory(base_name: str, dtype: str, num_heads: int, queue: multiprocessing.Queue) -> None:
    """Bytes above the loaded base at the peak of three steps on 8 x 512 tokens, all of them under loss."""
    base = load_base_model(base_name, dtype=dtype)
    before = resident_bytes("VmRSS")
    trainer = Trainer(base, num_heads, torch.arange(DRAFT_TOKENS))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, DRAFT_TOKENS, (BATCH_SIZE, 512), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    batch = collate([Example(row, loss) for row, loss in zip(ids, mask, strict=True)])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    for _ in range(3):
        trainer.step(batch)
    queue.put((resident_bytes("VmHWM") - before, trainer.state_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="runs/demo-model")
    parser.add_argument("--data", default="data/demo.jsonl.xz")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    base = load_base_model(options.base, dtype=options.dtype)
    examples = build_dataset(options.data, base.tokenizer, 512).examples
    report: dict[str, object] = {"machine": describe_machine(), "dtype": options.dtype}
    report["speed"] = speed = measure_speed(base, examples, options.batches)
    for name, value in speed.items():
        print(f"{name:<40} {value:10.2f}")
    del base
    context, memory = multiprocessing.get_context("spawn"), {}
    for num_heads in (1, 2, 4, 8):
        queue = context.Queue()
        process = context.Process(target=peak_memory, args=(options.base, options.dtype, num_heads, queue))
        process.start()
        peak, state = queue.get()
        process.join()
        memory[num_heads] = {"peak_above_base": peak, "heads_and_optimizer": state}
        shown = f"{peak / 2**20:10.0f} MiB, {state / 2**20:.0f} of them the heads and their optimizer"
        print(f"peak memory above the base, K = {num_heads:<9} {shown}")
    report["peak_bytes"] = memory
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
