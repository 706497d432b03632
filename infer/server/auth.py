"""API keys: several, from a file or the environment, compared without telling by time how much of one was right."""

from __future__ import annotations

import hashlib
import hmac
import stat
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import ApiError

ENVIRONMENT = "MEDUSA_API_KEYS"
MIN_LENGTH = 16


class ApiKeys:
    """Holds digests only, so that no key can be logged. Without keys everyone is let in."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """authorization: the header, `Bearer KEY`. Raises ApiError 401."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401, "missing or wrong API key; send Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def load_keys(path: Path | None, environment: Mapping[str, str]) -> ApiKeys:
    """Keys of a file (one a line; # begins a comment) and of MEDUSA_API_KEYS (divided by commas).

    Raises ValueError for a file that cannot be read or holds no key, and for a key that is too short to be safe.
    """
    keys = [key.strip() for key in environment.get(ENVIRONMENT, "").split(",") if key.strip()]
    if path is not None:
        keys += _read(path)
    if short := [key for key in keys if len(key) < MIN_LENGTH]:
        raise ValueError(
            f"API keys: got one of {len(short[0])} characters, expected at least {MIN_LENGTH}; make one with "
            "`openssl rand -hex 32`"
        )
    return ApiKeys(keys)


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file: {path} cannot be read as text: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file: {path} holds no key; expected one a line")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        warnings.warn(f"{path} can be read by others; chmod 600 it", stacklevel=2)
    return keys
