"""Running out of memory, said in terms of what can be lowered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
