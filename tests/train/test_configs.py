"""Every file in configs/train: it loads, and its first two steps run, on a tiny base and little data."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

from medusa.base_model import load_base_model
from medusa.checkpoint import check_base, load_heads
from medusa.fingerprint import fingerprint
from medusa.train.config import load_config
from medusa.train.run import train
from tiny_models import save_tiny_base

FOLDER = Path(__file__).parents[2] / "configs" / "train"


def tiny(tmp_path, base, data):
    """What a test changes: where things are and how many, never what is done."""
    settings = {
        "model.base": base,
        "data.path": data,
        "data.limit": 24,
        "heads.draft_vocab_size": 40,
        "optim.max_steps": 2,
        "optim.batch_size": 4,
        "train.output_dir": tmp_path / "out",
    }
    return [f"{name}={value}" for name, value in settings.items()]


def test_there_are_configs():
    assert {"quickstart.yaml", "medusa2.yaml", "qlora.yaml", "gpu.yaml", "demo_heads.yaml"} <= {
        path.name for path in FOLDER.iterdir()
    }


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_the_first_two_steps_run(path, tmp_path, chat_file):
    # Blocks of 64 values are the least that a CPU unpacks from 4 bits.
    base = save_tiny_base(tmp_path / "base", hidden_size=128, intermediate_size=128, head_dim=32)
    settings = tiny(tmp_path, base, chat_file)
    if load_config(path).heads.fused_layers:
        settings.append("heads.fused_layers=[1]")  # the tiny base has no more
    result = train(load_config(path, settings))
    assert result.steps == 2
    # Whatever it was trained in, the heads belong to the base in full precision.
    check_base(load_heads(tmp_path / "out")[1], fingerprint(load_base_model(str(base)).model), "tiny")


def test_four_bits_without_bitsandbytes_say_what_is_missing(tmp_path, tiny_base_dir, chat_file, monkeypatch):
    monkeypatch.setattr(
        "medusa.base_model.find_spec", lambda name: None if name == "bitsandbytes" else util.find_spec(name)
    )
    with pytest.raises(ValueError, match="needs the package bitsandbytes, got none installed; pip install"):
        train(load_config(FOLDER / "qlora.yaml", tiny(tmp_path, tiny_base_dir, chat_file)))
