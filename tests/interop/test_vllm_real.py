"""vLLM itself; installs it, so only on request: pytest -m vllm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_vllm_says_the_same_with_our_heads(repo_root, demo_model_dir, tmp_path):
    settings = {"VENV": str(Path(sys.executable).parent.parent), "OUT": str(tmp_path / "vllm.json")}
    done = subprocess.run(["scripts/test_vllm.sh"], cwd=repo_root, env=os.environ | settings)
    assert done.returncode == 0
