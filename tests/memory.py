"""How many bytes of tensors are alive at once, counted rather than measured: the same on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """While entered, `peak` is the largest number of bytes held at once by tensors made since. Workspace inside an
    operator is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id_of(t) for t in tensors_of((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tensors_of(result):
            key = id_of(tensor)
            if key not in known and key not in self._alive:
                storage = tensor.untyped_storage()
                self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]
