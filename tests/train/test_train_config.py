"""Configs: every mistake is one line that says got, expected and the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medusa.train.config import DataSource, TrainConfig, as_sources, load_config
from medusa.train.run import resolve_dtype


def test_overrides_are_typed_by_the_setting(config_file):
    config = load_config(
        config_file(),
        ["optim.lr=1e-3", "optim.epochs=7", "heads.draft_vocab_size=null", "train.cache_hidden_states=true"],
    )
    assert (config.optim.lr, config.optim.epochs) == (1e-3, 7)
    assert config.heads.draft_vocab_size is None and config.train.cache_hidden_states is True
    assert load_config(config_file(), ["data.path=[a.jsonl, b.jsonl]"]).data.path == ["a.jsonl", "b.jsonl"]
    assert load_config(config_file(), ["loss.head_decay=0.9"]).loss.head_decay == 0.9


@pytest.mark.parametrize(
    "override, message",
    [
        ("optim.learning_rat=1", r"unknown setting optim\.learning_rat; expected one of lr, "),
        ("optim.warmup_rati=1", r"unknown setting optim\.warmup_rati; did you mean optim\.warmup_ratio\?"),
        ("optm.lr=1", r"unknown setting optm; did you mean optim\?"),
        ("optim.lr=fast", r"optim\.lr: got 'fast', expected a valid number"),
        ("optim.lr=-1", r"optim\.lr: got -1, expected greater than 0"),
        ("optim.lr=.nan", r"optim\.lr: got nan, expected a finite number"),
        ("optim.epochs=1.5", r"optim\.epochs: got 1\.5, expected a valid integer"),
        ("heads.lm_head=tied", r"heads\.lm_head: got 'tied', expected 'own' or 'shared'"),
        ("model.dtype=float16", r"model\.dtype: got 'float16', expected 'auto', 'float32' or 'bfloat16'"),
        ("model.base=null", r"model\.base: got None, expected a valid string"),
        ("data.path=[]", r"data\.path: got \[\], expected a file, a Hub name, or a list"),
        ("data.path=3", r"data\.path: got 3, expected a file, a Hub name, or a list"),
        ("data.path=[3]", r"data\.path\.0: got 3, expected a path or \{path: \.\.\., weight: \.\.\.\}"),
        ("data.path=[a, {path: b, weight: 0}]", r"data\.path\.1\.weight: got 0, expected greater than 0"),
        ("data.path=[{path: b, weight: -1}]", r"data\.path\.0\.weight: got -1, expected greater than 0"),
        ("data.path=[{path: b, weight: .inf}]", r"data\.path\.0\.weight: got inf, expected a finite number"),
        ("data.path=[{path: b, weight: lots}]", r"data\.path\.0\.weight: got 'lots', expected a valid number"),
        ("data.path=[{weight: 1}]", r"data\.path\.0\.path is not set"),
        ("data.path=[{path: b, wieght: 1}]", r"unknown setting data\.path\.0\.wieght; expected one of path, weight"),
        ("data.num_workers=0", r"data\.num_workers: got 0, expected greater than or equal to 1"),
        ("data.packing=often", r"data\.packing: got 'often', expected a valid boolean"),
        ("data.stream=true", r"unknown setting data\.stream; did you mean data\.streaming\?"),
        ("optim.lr", "got no setting, expected section.key=value"),
        ("lr=1", "got no setting, expected section.key=value"),
        ("optim.lr=[", "got a value that is no YAML"),
    ],
)
def test_a_wrong_override_is_one_clear_line(config_file, override, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(config_file(), [override])
    assert "\n" not in str(caught.value)


def test_sources_may_have_weights(config_file):
    config = load_config(config_file(), ["data.path=[a.jsonl, {path: b.jsonl, weight: 2}]"])
    assert config.data.path == ["a.jsonl", DataSource(path="b.jsonl", weight=2.0)]
    assert [source.weight for source in as_sources(config.data.path)] == [1.0, 2.0]
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


def test_wrong_files(tmp_path):
    cases = {
        "{": "broken YAML",
        "- a": "got a list",
        "": r"model is not set.*data is not set",
        "model: 3": "model: got 3",
    }
    for content, message in cases.items():
        (tmp_path / "c.yaml").write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            load_config(tmp_path / "c.yaml")
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="got no such file"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ValueError, match="got a directory"):
        load_config(tmp_path)
    (tmp_path / "c.yaml").write_text("optim: 3")
    with pytest.raises(ValueError, match="section optim: got 3"):
        load_config(tmp_path / "c.yaml", ["optim.lr=1"])


def test_nothing_executes(tmp_path):
    (tmp_path / "c.yaml").write_text("model: !!python/object/apply:os.system [exit 1]")
    with pytest.raises(ValueError, match="broken YAML"):
        load_config(tmp_path / "c.yaml")


def test_every_training_config_of_the_project_loads(repo_root: Path):
    files = sorted((repo_root / "configs" / "train").glob("*.yaml"))
    assert files
    for path in files:
        assert isinstance(load_config(path), TrainConfig)


@pytest.mark.parametrize("supported", [None, "amx_tile", "avx512_bf16"])
def test_auto_is_bfloat16_where_the_processor_multiplies_it(config_file, monkeypatch, supported):
    for name in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name == supported, raising=False)
    config = resolve_dtype(load_config(config_file(model__dtype="auto")), torch.device("cpu"))
    assert config.model.dtype == ("bfloat16" if supported else "float32")
