"""Heads directories: round trips are exact, and everything that does not fit is refused by name."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa.checkpoint import BaseReference, HeadsInfo, check_base, load_heads, save_heads, write_atomically
from medusa.conditioned_heads import make_heads
from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads

D, V = 8, 20
INFO = HeadsInfo(BaseReference("org/model", "ab" * 32, "main"))


def make(lm_head="own", draft=6, dtype=torch.float32):
    heads = MedusaHeads(HeadsConfig(2, 2, D, V, lm_head, draft), None if draft is None else torch.arange(1, 7))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads.to(dtype)


@pytest.fixture
def folder(tmp_path):
    save_heads(tmp_path / "heads", make(), INFO)
    return tmp_path / "heads"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *parents, key = path.split("__")
        target = config
        for parent in parents:
            target = target[parent]
        if value is None:
            del target[key]
        else:
            target[key] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("draft", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(tmp_path, lm_head, draft, dtype):
    heads = make(lm_head, draft, dtype)
    weight = torch.randn(V, D, dtype=dtype)
    heads.attach_base(weight, weight)
    save_heads(tmp_path / "heads", heads, INFO)
    loaded, info = load_heads(tmp_path / "heads")
    loaded.attach_base(weight, weight)
    assert info == INFO and loaded.config == heads.config and loaded.dtype == dtype
    hidden = torch.randn(3, D, dtype=dtype)
    assert torch.equal(loaded(hidden), heads(hidden))
    assert sorted(os.listdir(tmp_path / "heads")) == ["config.json", "heads.safetensors"]


CONFIG_FAULTS = [
    ({"schema_version": 2}, "got schema_version 2, expected 1"),
    ({"schema_version": None}, "got schema_version None"),
    ({"extra": 1}, "got unknown extra"),
    ({"tree": None}, "got no tree"),
    ({"tree": "../tree.json"}, "the name of a file in the same directory"),
    ({"dtype": "int8"}, "got dtype 'int8'"),
    ({"heads__num_head": 3}, "got unknown heads.num_head"),
    ({"heads__num_heads": None}, "got no heads.num_heads"),
    ({"heads__num_heads": 0}, "num_heads is 0"),
    ({"heads__num_heads": 3}, "got no tensor blocks.2.0.linear.bias"),
    ({"heads__num_layers": 1}, "got tensor blocks.0.1.linear.bias"),
    ({"heads__hidden_size": 9}, r"as float32 \[6, 8\], expected float32 \[6, 9\]"),
    ({"heads__lm_head": "shared"}, "got tensor projections.0.weight"),
    ({"heads__draft_vocab_size": 5}, r"got draft token ids torch.int64 \[6\]"),
    ({"dtype": "bfloat16"}, r"as float32 \[6, 8\], expected bfloat16 \[6, 8\]"),
    ({"base_model": "name"}, "got base_model 'name', expected an object"),
    ({"base_model__fingerprint": None}, "got no base_model.fingerprint"),
    ({"base_model__name": 3}, "got base_model.name 3"),
]


@pytest.mark.parametrize("changes, message", CONFIG_FAULTS, ids=[message for _, message in CONFIG_FAULTS])
def test_a_config_that_does_not_fit_is_refused(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_heads(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_broken_config_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json: got"):
        load_heads(folder)


def test_tensors_that_do_not_fit_are_refused(folder):
    path = folder / "heads.safetensors"
    good = load_file(path)
    faults = {
        "got no tensor projections.1.weight": {k: v for k, v in good.items() if k != "projections.1.weight"},
        "got tensor medusa_head.0": good | {"medusa_head.0": torch.zeros(1)},
        r"projections.0.weight as float32 \[6, 7\], expected float32 \[6, 8\]": good
        | {"projections.0.weight": torch.zeros(6, 7)},
        "got no draft token ids": {k: v for k, v in good.items() if k != "draft_token_ids"},
    }
    for message, tensors in faults.items():
        save_file(tensors, path)
        with pytest.raises(ValueError, match=message):
            load_heads(folder)


def test_damaged_files_are_refused(folder):
    path = folder / "heads.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], content[:4], b"", pickle.dumps({"a": 1})):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"heads\.safetensors: got a file that is no complete safetensors"):
            load_heads(folder)
    path.unlink()
    with pytest.raises(ValueError, match="got no heads.safetensors"):
        load_heads(folder)


def test_wrong_places_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got no such directory"):
        load_heads(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="got a file, expected a heads directory"):
        load_heads(tmp_path / "file")
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match=r"got no config\.json"):
        load_heads(tmp_path / "old")
    (tmp_path / "old" / "medusa_lm_head.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match=r"pickle files \(medusa_lm_head\.pt\), which are never loaded"):
        load_heads(tmp_path / "old")


def test_another_base_is_refused_naming_both():
    check_base(INFO, "ab" * 32, "a local copy of it")
    message = "got base model 'other/model' .*cdcdcd.*expected 'org/model' at revision main .*ababab"
    with pytest.raises(ValueError, match=message):
        check_base(INFO, "cd" * 32, "other/model")


def test_a_failed_write_leaves_the_old_files_whole(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(
            {folder / "config.json": lambda path: path.write_text("new"), folder / "heads.safetensors": full_disk}
        )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("design", ["markov", "hydra"])
def test_conditioned_heads_come_back_as_they_were(tmp_path, design):
    config = HeadsConfig(2, 2, D, V, "shared", 6, design, 3 if design == "markov" else None)
    heads, weight = make_heads(config, torch.arange(1, 7)), torch.randn(V, D)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(tmp_path, heads, INFO)
    loaded, _ = load_heads(tmp_path)
    for made in (heads, loaded):
        made.attach_base(weight, weight)
    hidden, prefix = torch.randn(5, D), torch.randint(0, V, (5, 2))
    assert type(loaded) is type(heads) and torch.equal(loaded(hidden, prefix), heads(hidden, prefix))


def test_heads_from_before_there_were_designs_are_medusa_heads(folder):
    content = json.loads((folder / "config.json").read_text())
    del content["heads"]["design"], content["heads"]["markov_rank"]
    (folder / "config.json").write_text(json.dumps(content))
    assert load_heads(folder)[0].config.design == "medusa"


def test_heads_may_be_saved_in_half_precision(tmp_path):
    heads = make()
    save_heads(tmp_path, heads, INFO, torch.bfloat16)
    loaded, _ = load_heads(tmp_path)
    assert heads.dtype == torch.float32 and loaded.dtype == torch.bfloat16
    expected = heads.projections[0].weight.to(torch.bfloat16)
    assert torch.equal(loaded.projections[0].weight, expected)
    assert torch.equal(loaded.draft_token_ids, heads.draft_token_ids)
