"""Heads on the Hub: fetched by name into its usual cache, pushed from a directory. Needs huggingface_hub, which
Transformers brings along; its settings hold, such as HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .adapter import ADAPTER_FOLDER

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Data only; nothing that could be executed is fetched.
PATTERNS = ("heads.safetensors", "*.json", f"{ADAPTER_FOLDER}/*.safetensors")


def find_heads(
    name_or_folder: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    patterns: Sequence[str] = PATTERNS,
) -> Path:
    """The heads directory itself, or that of the Hub repository `owner/name`, fetched where it is not in the cache.

    patterns: of the files wanted. Settings as huggingface_hub has them.
    Raises ValueError for a repository or a revision that is not to be had.
    """
    folder = Path(name_or_folder)
    if folder.exists() or not REPO_ID.fullmatch(str(name_or_folder)):
        if revision is not None:
            raise ValueError(f"{folder}: got revision {revision!r} for a directory, expected none; it has just one")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(
                str(name_or_folder),
                revision=revision,
                token=token,
                local_files_only=local_files_only,
                allow_patterns=list(patterns),
            )
        )
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        at = f" at revision {revision!r}" if revision else ""
        raise ValueError(
            f"{name_or_folder}: got no directory of that name and no Hub repository{at} ({reason}), expected heads; "
            "check the name, the connection, and `hf auth login` where it is private"
        ) from error


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError for a name that no repository can have."""
    if not REPO_ID.fullmatch(repo_id):
        raise ValueError(f"--push-to-hub: got {repo_id!r}, expected owner/name")


def push_folder(folder: Path, repo_id: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload all of `folder`, making the repository where it is missing. Returns its address.

    Raises ValueError for a name that is none, RuntimeError where the Hub refuses.
    """
    check_repo_id(repo_id)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message="Medusa heads by medusa-decoding"
        )
    except (HfHubHTTPError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"{repo_id}: the Hub refused ({reason}); {folder} is written and can be pushed again"
        ) from error
    return str(url)
