"""One run at a time in an output directory, and a directory that can be written to, known before anything is loaded.

The lock is the operating system's (flock): it goes with the process that holds it, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claim_folder(folder: Path) -> Iterator[None]:
    """Makes `folder` (`output_dir/training`) and holds it while entered.

    Raises ValueError where it cannot be made or written to, and where another process holds it.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(
            f"train.output_dir {folder.parent}: got a place that cannot be written to ({error.strerror}: "
            f"{error.filename}), expected a directory or one that can be made; set another train.output_dir"
        ) from error
    try:
        _lock(descriptor, folder.parent)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, output_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            warnings.warn(
                f"{output_dir}: no locks on this file system ({error.strerror}); see to it that one run trains there",
                stacklevel=2,
            )
            return
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
        raise ValueError(
            f"train.output_dir {output_dir}: got a directory that another run is training into ({holder}), expected "
            "one of its own; wait for that run, stop it, or set another train.output_dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)


def is_held(folder: Path) -> bool:
    """Whether a run is going on in `folder`, as far as this machine's locks tell."""
    path = folder / "lock"
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False
