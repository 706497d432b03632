"""Speed told in terms of the hardware: the arithmetic, the peaks, the bare forward; training is not touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa.base_model import load_base_model
from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.train import forward_speed
from medusa.train.forward_speed import is_mixture_of_experts, measure_forward, model_flops
from medusa.train.run import train
from medusa.train.throughput import Throughput, peak_by_name, peak_flops, peak_memory

CPU = torch.device("cpu")


def test_mfu_is_flops_done_over_flops_possible():
    found = Throughput(CPU, base_flops=100.0, head_flops=10.0, peak_flops=20_000.0).measures(400, 1000, 5.0)
    assert found["tokens_per_second"] == 80
    assert found["mfu"] == pytest.approx((400 * 100 + 1000 * 10) / 5 / 20_000)
    assert "share_of_forward" not in found


def test_without_a_peak_the_bare_forward_is_the_measure():
    throughput = Throughput(CPU, 100.0, 10.0, forward_tokens_per_second=160.0)
    found = throughput.measures(400, 1000, 5.0)
    assert found["share_of_forward"] == 0.5 and "mfu" not in found
    assert throughput.status(400, 1000, 5.0).startswith("80 tokens/s, 0.50 of the bare forward, peak ")
    neither = Throughput(CPU, 100.0, 10.0).measures(400, 1000, 5.0)
    assert set(neither) == {"tokens_per_second", "peak_memory_bytes"}


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_by_the_names_that_devices_give_themselves(name, peak):
    assert peak_by_name(name) == peak


def test_a_peak_in_half_precision_says_nothing_of_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(torch.device("cuda"), "bfloat16") == 989e12
    assert peak_flops(torch.device("cuda"), "float32") is None
    assert peak_flops(CPU, "bfloat16") is None


def test_peak_memory_is_what_the_system_counts():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    assert peak_memory(CPU) == pytest.approx(int(line.split()[1]) * 1024, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_model_flops_are_counted_by_parameters(tmp_path, tied):
    """Of the base all but embeddings and lm_head; of a head its blocks and its projection, shared ones without the
    gradient that they do not have."""
    from tiny_models import save_tiny_base

    base = load_base_model(str(save_tiny_base(tmp_path, tie_word_embeddings=tied)))
    size, draft = base.hidden_size, base.vocab_size
    inner = sum(p.numel() for name, p in base.model.named_parameters() if "layers" in name or "norm" in name)
    block = 2 * (size * size + size)
    for lm_head, per_label in (("own", 6 * (block + size * draft)), ("shared", 6 * block + 4 * size * draft)):
        heads = MedusaHeads(HeadsConfig(3, 2, size, draft, lm_head=lm_head))
        heads.init_from_base(base.lm_head_weight, base.embedding_weight)
        assert model_flops(base.model, heads, 3, is_cached=False) == (2 * inner, per_label)
        assert model_flops(base.model, heads, 3, is_cached=True) == (0, per_label)


def test_no_mfu_for_a_mixture_of_experts(tiny_base_dir):
    config = load_base_model(str(tiny_base_dir)).config
    assert not is_mixture_of_experts(config)
    config.num_local_experts = 8
    assert is_mixture_of_experts(config)


@pytest.mark.parametrize(
    "durations, rate",
    [([0.4, 0.3, 0.1, 0.2], 100 / 0.2), ([0.6], 100 / 0.6)],  # the first is only a warm-up; a slow one is enough
)
def test_the_bare_forward_is_the_median_of_a_few_calls(monkeypatch, durations, rate):
    now, calls = [0.0], []

    def forward():
        calls.append(None)
        now[0] += durations[len(calls) - 1]

    monkeypatch.setattr(forward_speed.time, "perf_counter", lambda: now[0])
    assert measure_forward(forward, 100, lambda value: value) == pytest.approx(rate)
    assert len(calls) == len(durations)


def test_a_long_run_is_judged_by_the_bare_forward_and_not_changed_by_it(
    make_config, tmp_path, monkeypatch, read_metrics
):
    """Shorter ones, in which timing it would count, go without."""
    short = train(make_config("short"))
    assert short.share_of_forward is None and all("share_of_forward" not in r for r in read_metrics("short"))
    monkeypatch.setattr(forward_speed, "MIN_BATCHES", 1)
    result = train(make_config("long"))
    summary = json.loads((tmp_path / "long" / "training" / "summary.json").read_text())
    assert summary["share_of_forward"] == result.share_of_forward > 0
    assert summary["peak_memory_bytes"] > 10_000_000
    assert all(r["share_of_forward"] > 0 and r["peak_memory_bytes"] > 10_000_000 for r in read_metrics("long"))
    weights = [(tmp_path / out / "heads.safetensors").read_bytes() for out in ("short", "long")]
    assert weights[0] == weights[1]


def test_mfu_where_the_peak_is_known(make_config, monkeypatch, read_metrics):
    monkeypatch.setattr(forward_speed, "peak_flops", lambda device, dtype: 1e9)
    result = train(make_config())
    assert result.mfu > 0 and result.share_of_forward is None
    last = read_metrics()[-1]
    assert last["mfu"] > 0 and last["tokens_per_second"] > 0
