"""Running out of memory or disk, said in terms of what can be lowered."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

ON_A_CPU = "can't allocate memory"  # torch raises a plain RuntimeError there


@contextmanager
def memory_advice(doing: str) -> Iterator[None]:
    """Raises RuntimeError in place of any of the ways in which torch runs out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or ON_A_CPU in str(error)
        if not is_memory:
            raise
        raise RuntimeError(
            f"out of memory while {doing}; lower optim.batch_size (and raise optim.gradient_accumulation as much), "
            "data.max_length or loss.chunk_size, and start a new run with them: set another train.output_dir"
        ) from error


def check_free_disk(folder: Path, heads: nn.Module) -> None:
    """Raises ValueError where the disk of `folder` lacks room for what the run will write there at most."""
    weights = sum(tensor.nbytes for tensor in heads.state_dict().values())
    moments = 2 * sum(parameter.nbytes for parameter in heads.parameters() if parameter.requires_grad)
    checkpoint = weights + moments
    # Each file is written beside the one it replaces: two checkpoints, two of the best heads, the heads that come out.
    needed = 2 * checkpoint + 3 * weights
    present = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = shutil.disk_usage(folder).free
    if free + present < needed:
        raise ValueError(
            f"{folder}: got {free / 1e9:.3f} GB of free disk, expected {(needed - present) / 1e9:.3f} GB for "
            "checkpoints and heads; free some or set another train.output_dir"
        )
