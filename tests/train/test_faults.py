"""What stops a run from outside: one clear line, and the last checkpoint as good as before."""

from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError

from medusa.train import features as features_module
from medusa.train import state as state_module
from medusa.train.faults import memory_advice
from medusa.train.run import train


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_says_what_to_lower(error):
    with (
        pytest.raises(RuntimeError, match=r"out of memory while training; lower optim\.batch_size"),
        memory_advice("training"),
    ):
        raise error


def test_a_real_allocation_that_fails_is_recognised():
    with pytest.raises(RuntimeError, match="out of memory while training"), memory_advice("training"):
        torch.empty(10**15)


def test_other_faults_are_left_as_they_are():
    with pytest.raises(RuntimeError, match="^something else$"), memory_advice("training"):
        raise RuntimeError("something else")


def test_out_of_memory_in_the_middle_leaves_a_run_that_goes_on(make_config, break_at, read_metrics):
    settings = {"train__save_every": 3, "optim__epochs": 2}
    break_at(8, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="out of memory while training"):
        train(make_config("broken", **settings))
    train(make_config("broken", **settings))
    train(make_config("straight", **settings))
    losses = [[record["loss"] for record in read_metrics(out)] for out in ("broken", "straight")]
    assert losses[0] == losses[1]


def test_a_full_disk_leaves_the_checkpoint_before(make_config, tmp_path, monkeypatch, read_metrics):
    """As safetensors reports it, half of the file written."""
    save, calls = state_module.save_file, []

    def full(tensors, path, **options):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half of it")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        return save(tensors, path, **options)

    settings = {"train__save_every": 3, "optim__epochs": 2}
    monkeypatch.setattr(state_module, "save_file", full)
    with pytest.raises(OSError, match=r"checkpoint\.safetensors: cannot be written .*No space left.*MB are free there"):
        train(make_config("full", **settings))
    assert not list((tmp_path / "full" / "training").glob(".*tmp"))
    train(make_config("full", **settings))
    train(make_config("straight", **settings))
    losses = [[record["loss"] for record in read_metrics(out)] for out in ("full", "straight")]
    assert losses[0] == losses[1]


def test_a_disk_that_fills_up_under_hidden_states(make_config, monkeypatch):
    """numpy tells of it without an error number."""
    write = features_module.write_atomically

    def full(writers):
        def fail(path):
            raise OSError("1000000 requested and 262144 written")

        return write({path: fail if path.suffix == ".bin" else writer for path, writer in writers.items()})

    monkeypatch.setattr(features_module, "write_atomically", full)
    with pytest.raises(OSError, match=r"shard-00000\.bin: cannot be written \(1000000 requested"):
        train(make_config(train__cache_hidden_states=True))
