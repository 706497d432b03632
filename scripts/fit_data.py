"""How much of a config's data fits the time: prints the override that `medusa train` should get, or nothing.

    python scripts/fit_data.py --config configs/train/quickstart.yaml --seconds 240

Times the base on a few batches of the data and works out how many conversations it can go through once in so many
seconds on this machine. Quickstart uses it to stay within its 20 minutes on slow processors.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from medusa.base_model import load_base_model
from medusa.train.batching import collate
from medusa.train.config import load_config
from medusa.train.dataset import build_dataset
from medusa.train.run import resolve_dtype

NUM_BATCHES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    config = resolve_dtype(load_config(options.config), torch.device("cpu"))
    base = load_base_model(config.model.base, dtype=config.model.dtype)
    data = build_dataset(config.data.path, base.tokenizer, config.data.max_length)
    size = config.optim.batch_size
    rates = []
    for start in range(0, size * (NUM_BATCHES + 1), size):
        batch = collate(sorted(data.examples, key=len)[len(data) // 2 :][start : start + size])
        began = time.perf_counter()
        base.hidden_states(batch.input_ids, batch.attention_mask)
        rates.append(batch.input_ids.numel() / (time.perf_counter() - began))
    rate = statistics.median(rates[1:])
    limit = int(len(data) * min(1.0, options.seconds * rate / data.statistics.tokens))
    if limit < len(data):
        print(f"data.limit={max(limit, 1)}")


if __name__ == "__main__":
    main()
