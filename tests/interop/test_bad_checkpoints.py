"""Damaged and hostile directories: one clear error each, nothing executed, nothing written."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa.cli import run
from medusa.interop.import_heads import import_heads

D, V = 32, 128
CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1}
FILE = "medusa_lm_head.safetensors"


def good():
    made = {}
    for k in range(2):
        made |= {f"{k}.0.linear.weight": torch.randn(D, D), f"{k}.0.linear.bias": torch.randn(D)}
        made[f"{k}.1.weight"] = torch.randn(V, D)
    return made


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(good(), folder / FILE)
    return folder


FAULTS: dict[str, tuple[Any, str]] = {}


def fault(message):
    def add(make):
        FAULTS[make.__name__] = (make, message)
        return make

    return add


def tensors(folder, **changes):
    content = load_file(folder / FILE) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in content.items() if value is not None}, folder / FILE)


def header(folder, change):
    """Rewrites the header of the safetensors file: `change` gets and gives its text."""
    content = (folder / FILE).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    text = change(content[8 : 8 + length].decode()).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def pickled(folder, content, **options):
    (folder / FILE).unlink()
    torch.save(content, folder / "medusa_lm_head.pt", **options)


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@fault("no complete safetensors file")
def truncated_tensors(folder):
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-100])


@fault("a header of .* expected a complete safetensors file")
def only_a_few_bytes(folder):
    (folder / FILE).write_bytes(b"abc")


@fault(r"\(header\): got broken JSON|a header of")
def corrupted_header(folder):
    header(folder, lambda text: "#" + text[1:])


@fault("a header of 1,099,511,627,776 bytes")
def oversized_header(folder):
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(struct.pack("<Q", 1 << 40) + content[8:])


@fault(r"the key '0.1.weight' is there twice")
def a_tensor_named_twice_in_a_header(folder):
    header(folder, lambda text: text.replace('"1.1.weight"', '"0.1.weight"'))


@fault("no complete safetensors file")
def a_shape_beyond_the_file(folder):
    header(folder, lambda text: text.replace("[128,32]", "[128,9999999]", 1))


@fault("got metadata .* expected strings")
def metadata_that_is_no_text(folder):
    header(folder, lambda text: '{"__metadata__":{"a":[1]},' + text[1:])


@fault(r"got head 1, layer 0 as \[31, 32\]")
def a_mismatched_block(folder):
    tensors(folder, **{"1__0__linear__weight": torch.randn(31, D)})


@fault(r"got a projection \[100, 32\], expected \[128, 32\]")
def a_mismatched_projection(folder):
    tensors(folder, **{"1__1__weight": torch.randn(100, D)})


@fault(r"got tensor 0.0.linear.weight as \[\], expected a matrix")
def a_number_for_a_matrix(folder):
    tensors(folder, **{"0__0__linear__weight": torch.tensor(1.0)})


@fault("of torch.int64, expected one of float32, bfloat16, float16")
def whole_numbers_for_weights(folder):
    tensors(folder, **{"1__1__weight": torch.ones(V, D, dtype=torch.int64)})


@fault("got tensors of torch.bfloat16 and torch.float32, expected one type")
def mixed_types(folder):
    tensors(folder, **{"1__1__weight": torch.ones(V, D, dtype=torch.bfloat16)})


@fault("got NaN or infinity in tensor 0.0.linear.bias")
def not_a_number(folder):
    tensors(folder, **{"0__0__linear__bias": torch.full((D,), float("nan"))})


@fault("got NaN or infinity in tensor 1.1.weight")
def infinity(folder):
    tensors(folder, **{"1__1__weight": torch.full((V, D), float("inf"))})


@fault("got no bias of head 1, layer 0")
def a_missing_bias(folder):
    tensors(folder, **{"1__0__linear__bias": None})


@fault(r"got projections of heads \[1\], expected of all 2")
def a_missing_projection(folder):
    tensors(folder, **{"0__1__weight": None})


@fault("got no weight of head 1, layer 0, expected 3 heads")
def a_gap_between_heads(folder):
    content = load_file(folder / FILE)
    save_file({name.replace("1.", "2.", 1) if name.startswith("1.") else name: t for name, t in content.items()},
              folder / FILE)  # fmt: skip


@fault("got tensor extra.weight, which is no part of Medusa heads")
def a_tensor_of_something_else(folder):
    tensors(folder, extra__weight=torch.ones(2))


@fault("got no tensors of Medusa heads")
def another_kind_of_checkpoint(folder):
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, folder / FILE)


@fault("got no .*safetensors and no medusa_lm_head.pt")
def no_tensors_at_all(folder):
    (folder / FILE).unlink()


@fault("got no file config.json")
def no_config(folder):
    (folder / "config.json").unlink()


@fault("got broken JSON")
def a_broken_config(folder):
    (folder / "config.json").write_text("{")


@fault("got a JSON list, expected an object")
def a_config_that_is_a_list(folder):
    (folder / "config.json").write_text("[]")


@fault("got broken JSON")
def a_config_that_is_no_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


@fault("the key 'medusa_num_heads' is there twice")
def a_config_with_a_key_twice(folder):
    (folder / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_heads": 3}')


@fault("NaN is no JSON number")
def a_config_with_nan(folder):
    (folder / "config.json").write_text('{"medusa_num_heads": NaN}')


@fault("got broken JSON")
def a_config_nested_without_end(folder):
    (folder / "config.json").write_text('{"a":' * 100_000)


@fault("got medusa_num_heads 'five', expected a whole number")
def a_count_that_is_a_word(folder):
    (folder / "config.json").write_text('{"medusa_num_heads": "five"}')


@fault("got medusa_num_layers True, expected a whole number")
def a_count_that_is_a_truth(folder):
    (folder / "config.json").write_text('{"medusa_num_layers": true}')


@fault(r"got medusa \[\], expected an object")
def settings_that_are_a_list(folder):
    (folder / "config.json").write_text('{"medusa": []}')


@fault("the file name '../secret.safetensors', expected one in the same directory")
def an_index_that_leads_out(folder):
    (folder.parent / "secret.safetensors").write_bytes((folder / FILE).read_bytes())
    index(folder, {"0.0.linear.weight": "../secret.safetensors"})


@fault("the file name '/etc/hostname', expected one in the same directory")
def an_index_with_an_absolute_name(folder):
    index(folder, {"0.0.linear.weight": "/etc/hostname"})


@fault("got no file shard-2.safetensors")
def an_index_with_a_missing_shard(folder):
    index(folder, {"0.0.linear.weight": FILE, "1.0.linear.weight": "shard-2.safetensors"})


@fault(f"says that {FILE} holds 7.0.linear.weight, which it does not")
def an_index_that_is_wrong(folder):
    index(folder, {"7.0.linear.weight": FILE})


@fault("got no weight_map of tensor names to file names")
def an_index_of_wrong_types(folder):
    index(folder, {"0.0.linear.weight": 7})


@fault("is there twice|got tensor 0.0.linear.weight in")
def a_tensor_in_two_files(folder):
    save_file({"0.0.linear.weight": torch.ones(D, D)}, folder / "zz.safetensors")


@fault("got a link out of the directory")
def a_link_out_of_the_directory(folder):
    (folder / FILE).rename(folder.parent / "elsewhere.safetensors")
    (folder / FILE).symlink_to(folder.parent / "elsewhere.safetensors")


@fault("got a link out of the directory")
def a_config_that_is_a_link_out(folder):
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere.json")


@fault("got no file medusa_lm_head.safetensors")
def a_directory_in_place_of_a_file(folder):
    (folder / FILE).unlink()
    (folder / FILE).mkdir()


@fault("expected ids of the base")
def a_token_map_below_zero(folder):
    tensors(folder, token_map=torch.arange(-1, V - 1))


@fault("expected ids of the base")
def a_token_map_with_a_token_twice(folder):
    tensors(folder, token_map=torch.zeros(V, dtype=torch.int64))


@fault("got a token_map up to token 1000, expected ids below 128")
def a_token_map_beyond_the_vocabulary(folder):
    tensors(folder, token_map=torch.cat([torch.arange(V - 1), torch.tensor([1000])]))


@fault("expected one for each projection row")
def a_token_map_of_another_length(folder):
    tensors(folder, token_map=torch.arange(7))


@fault("expected a row of token ids")
def a_token_map_of_floats(folder):
    tensors(folder, token_map=torch.ones(V))


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (os.environ["MEDUSA_TEST_BOMB"],))


@fault("code in it was not run")
def code_in_a_pickle(folder):
    pickled(folder, {"0.0.linear.weight": Bomb()})


@fault("code in it was not run")
def code_in_a_bare_pickle(folder):
    (folder / FILE).unlink()
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(Bomb()))


@fault("code in it was not run")
def a_truncated_pt(folder):
    pickled(folder, good())
    content = (folder / "medusa_lm_head.pt").read_bytes()
    (folder / "medusa_lm_head.pt").write_bytes(content[: len(content) // 2])


@fault("its parts are compressed")
def a_zip_bomb(folder):
    (folder / FILE).unlink()
    with zipfile.ZipFile(folder / "medusa_lm_head.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 1_000_000)


@fault("a list, expected tensors by name")
def a_pt_that_is_a_list(folder):
    pickled(folder, [torch.ones(1)])


@fault("got 'step', a int, expected a tensor")
def a_pt_with_more_than_tensors(folder):
    pickled(folder, good() | {"step": 3})


@fault("sparse, quantized, repeated or without data")
def a_pt_with_a_sparse_tensor(folder):
    pickled(folder, good() | {"0.1.weight": torch.eye(V, D).to_sparse()})


@fault("sparse, quantized, repeated or without data")
def a_pt_with_one_number_repeated_for_ever(folder):
    pickled(folder, good() | {"0.1.weight": torch.ones(1, 1).expand(1 << 20, 1 << 20)})


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_checkpoint_is_refused_whole(name, folder, tmp_path, base, monkeypatch, capsys):
    monkeypatch.setenv("MEDUSA_TEST_BOMB", str(tmp_path / "boom"))
    make, message = FAULTS[name]
    make(folder)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        import_heads(folder, tmp_path / "out", base.name)
    assert run(["import", "--from", str(folder), "--out", str(tmp_path / "out"), "--base", base.name]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # nothing written, nothing run


def test_there_are_enough_kinds():
    assert len(FAULTS) >= 20


def test_the_good_one_is_good(folder, tmp_path, base):
    assert import_heads(folder, tmp_path / "out", base.name).config.num_heads == 2


def test_places_that_are_none(tmp_path, base):
    for place, message in ((tmp_path / "nowhere", "no such directory"), (tmp_path / "file", "got a file")):
        if "file" in message:
            place.touch()
        with pytest.raises(ValueError, match=message):
            import_heads(place, tmp_path / "out", base.name)


def test_links_inside_a_hub_cache_are_followed(folder, tmp_path, base):
    """The Hub's cache holds files as links from snapshots/<commit>/ to blobs/."""
    entry = tmp_path / "models--org--heads"
    (entry / "snapshots").mkdir(parents=True)
    (entry / "blobs").mkdir()
    folder = folder.rename(entry / "snapshots" / "abc")
    for i, path in enumerate(list(folder.iterdir())):
        path.rename(entry / "blobs" / str(i))
        path.symlink_to(f"../../blobs/{i}")
    assert import_heads(folder, tmp_path / "out", base.name).config.num_heads == 2
