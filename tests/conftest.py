"""Fixtures shared by all tests. Models are tiny and random; only `demo_model_dir` is a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Before torch is first loaded: two busy OpenMP threads on two shared cores slow tiny models down many times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tiny_models import save_tiny_base, tiny_model, tiny_tokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: begun last, it would keep one core busy long after the others have finished."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def tiny_llama() -> Any:
    """Llama: 2 layers, D=32, 4 heads over 2 kv heads, V=128, float32; a fresh copy for each test."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token a printable ASCII character, ChatML template."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a tiny Llama and its tokenizer, as `--base` takes it. Shared: read only."""
    return save_tiny_base(tmp_path_factory.mktemp("tiny-base"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """SmolLM2-135M-Instruct in runs/demo-model, fetched (98 MB) and converted when missing."""
    folder = ROOT / "runs" / "demo-model"
    if not (folder / "model.safetensors").exists():
        command = [sys.executable, str(ROOT / "scripts" / "demo_model.py"), "--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"the demo model could not be made: {done.stdout}{done.stderr}"
    return folder
