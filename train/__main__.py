"""`python -m medusa.train --config FILE [section.key=value ...]`: `medusa train` under torchrun and accelerate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from .config import load_config
from .loop import NonFiniteLoss
from .run import train
from .signals import TrainingInterrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted (run again to continue)."""
    parser = argparse.ArgumentParser(prog="python -m medusa.train", description="Train Medusa heads on a frozen model.")
    parser.add_argument("--config", required=True, help="YAML file, such as configs/train/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as optim.lr=1e-3")
    options = parser.parse_args(arguments)
    try:
        result = train(load_config(options.config, options.overrides), Console())
    except ValueError as error:
        return _fail(error, 2)
    except (NonFiniteLoss, OSError) as error:
        return _fail(error, 1)
    except TrainingInterrupted as error:
        return _fail(error, 130)
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to continue", 130)
    print(f"heads: {result.heads_dir} ({result.stop_reason}, {result.tokens_per_second:,.0f} tokens/s)")
    return 0


def _fail(reason: object, status: int) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
