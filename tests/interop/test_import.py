"""Heads that others wrote: every layout in use, counted from the tensors; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from medusa.checkpoint import load_heads
from medusa.infer import generate
from medusa.interop.import_heads import import_heads
from medusa.model import MedusaModel

D, V, K = 32, 128, 3


def tensors(prefix="", num_heads=K, num_layers=1, projections=True):
    generator = torch.Generator().manual_seed(3)
    made = {}
    for k in range(num_heads):
        for j in range(num_layers):
            made[f"{prefix}{k}.{j}.linear.weight"] = torch.randn(D, D, generator=generator)
            made[f"{prefix}{k}.{j}.linear.bias"] = torch.randn(D, generator=generator)
        if projections:
            made[f"{prefix}{k}.{num_layers}.weight"] = torch.randn(V, D, generator=generator)
    return made


def write(folder, content, config, pickled=False):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(content, folder / "medusa_lm_head.pt")
    else:
        save_file(content, folder / "medusa_lm_head.safetensors")
    return folder


def imported(tmp_path, base, source, base_dir=None):
    done = import_heads(source, tmp_path / "back", base_dir or base.name)
    return load_heads(tmp_path / "back")[0], done.notes


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
@pytest.mark.parametrize("pickled", [False, True])
def test_the_originals_names_with_every_prefix(tmp_path, base, prefix, pickled):
    content = tensors(prefix, num_layers=2)
    config = {"medusa_num_heads": K, "medusa_num_layers": 2, "medusa": {"num_medusa_heads": K, "num_medusa_layers": 2}}
    heads, notes = imported(tmp_path, base, write(tmp_path / "in", content, config, pickled))
    assert not notes and (heads.config.num_heads, heads.config.num_layers, heads.config.lm_head) == (K, 2, "own")
    assert torch.equal(heads.blocks[1][1].linear.bias, content[f"{prefix}1.1.linear.bias"])
    assert torch.equal(heads.projections[2].weight, content[f"{prefix}2.2.weight"])


def test_heads_are_counted_not_believed(tmp_path, base):
    """The published configs of the first release say 2 heads; the files have 5."""
    source = write(tmp_path / "in", tensors(num_heads=5), {"medusa_num_heads": 2, "medusa_num_layers": 1}, True)
    heads, notes = imported(tmp_path, base, source)
    assert heads.config.num_heads == 5
    assert notes == ["config.json says 2 heads, the tensors are 5: the tensors are right"]


def test_a_block_that_is_shared_in_the_file_is_two_here(tmp_path, base):
    """`[ResBlock(h)] * n` saves one storage under n names."""
    content = tensors(num_layers=2)
    for k in range(K):
        for part in ("weight", "bias"):
            content[f"{k}.1.linear.{part}"] = content[f"{k}.0.linear.{part}"]
    heads, _ = imported(tmp_path, base, write(tmp_path / "in", content, {}, True))
    first, second = heads.blocks[0][0].linear.weight, heads.blocks[0][1].linear.weight
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_residual_blocks_alone_share_the_lm_head(tmp_path, base):
    heads, _ = imported(tmp_path, base, write(tmp_path / "in", tensors(projections=False), {"version": "2"}))
    assert heads.config.lm_head == "shared"


def test_projections_that_are_the_lm_head_are_shared(tmp_path, base):
    content = tensors()
    content |= {f"{k}.1.weight": base.lm_head_weight.clone() for k in range(K)}
    heads, _ = imported(tmp_path, base, write(tmp_path / "in", content, {}))
    assert heads.config.lm_head == "shared"


def vllm(**more):
    content = {f"blocks.{k}.layers.0.weight": torch.randn(D, D) for k in range(K)}
    return content | more


def test_vllms_defaults_have_no_biases(tmp_path, base):
    content = vllm(**{f"lm_heads.{k}.weight": torch.randn(V, D) for k in range(K)})
    heads, notes = imported(tmp_path, base, write(tmp_path / "in", content, {"model_type": "medusa", "num_heads": K}))
    assert notes == ["the blocks have no biases; written as zeros"] and not heads.blocks[0][0].linear.bias.any()


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "lm_head.weight"])
def test_vllms_shared_lm_head(tmp_path, base, name):
    config = {"model_type": "medusa", "original_lm_head": True}
    content = vllm(**{name: base.lm_head_weight.clone()})
    assert imported(tmp_path, base, write(tmp_path / "in", content, config))[0].config.lm_head == "shared"


def test_a_shared_projection_of_its_own_is_copied(tmp_path, base):
    config = {"model_type": "medusa", "original_lm_head": True}
    content = vllm(**{"lm_heads.0.weight": torch.randn(V, D)})
    heads, notes = imported(tmp_path, base, write(tmp_path / "in", content, config))
    assert heads.config.lm_head == "own" and "copied 3 times" in notes[-1]
    assert torch.equal(heads.projections[2].weight, content["lm_heads.0.weight"])


def test_vllms_token_map_becomes_a_draft_vocabulary(tmp_path, base):
    ids = torch.tensor([9, 4, 100])
    content = vllm(token_map=ids, **{f"lm_heads.{k}.weight": torch.randn(3, D) for k in range(K)})
    heads, _ = imported(tmp_path, base, write(tmp_path / "in", content, {"model_type": "medusa"}))
    assert heads.draft_token_ids.tolist() == [4, 9, 100]
    assert torch.equal(heads.projections[1].weight[0], content["lm_heads.1.weight"][1])


def test_modelopt_fp8_is_multiplied_out(tmp_path, base):
    content = tensors("medusa_heads.")
    for name in [name for name in content if name.endswith("weight")]:
        stem = name.removesuffix(".weight")
        content[name] = content[name].to(torch.float8_e4m3fn)
        content |= {f"{stem}.weight_scale": torch.tensor(0.5), f"{stem}.input_scale": torch.tensor(1.0)}
    expected = (content["medusa_heads.0.0.linear.weight"].float() * 0.5).to(torch.bfloat16)
    heads, notes = imported(tmp_path, base, write(tmp_path / "in", content, {"medusa": {"num_medusa_heads": K}}))
    assert heads.dtype == torch.bfloat16 and torch.equal(heads.blocks[0][0].linear.weight, expected)
    assert notes == ["FP8 weights were multiplied by their scales; written as bfloat16"]


@pytest.fixture
def whole_model(tmp_path, base):
    folder = tmp_path / "whole"
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    content = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    save_file(content | tensors("medusa_head."), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_whole_model_brings_its_own_base(tmp_path, base, whole_model):
    heads, _ = imported(tmp_path, base, whole_model, str(whole_model))
    assert heads.config.num_heads == K
    model = MedusaModel.from_pretrained(tmp_path / "back", pack=False)
    [fast] = generate(model, ["Hello"], max_new_tokens=12)
    [plain] = generate(model, ["Hello"], max_new_tokens=12, speculate=False)
    assert fast.token_ids == plain.token_ids


def test_heads_of_a_whole_model_do_not_go_to_another_base(tmp_path, base, whole_model):
    with torch.no_grad():
        base_weight = base.model.lm_head.weight
        first = base_weight[0, 0].clone()
        base_weight[0, 0] += 1
        base.model.save_pretrained(tmp_path / "changed")
        base_weight[0, 0] = first
    base.tokenizer.save_pretrained(tmp_path / "changed")
    with pytest.raises(ValueError, match="whose own lm_head.weight is not that of the base .*give --base"):
        import_heads(whole_model, tmp_path / "back", str(tmp_path / "changed"))


def test_heads_for_another_size_of_base_are_refused(tmp_path, base):
    content = {name: tensor[..., :16] if "linear.bias" in name else tensor for name, tensor in tensors().items()}
    content = {
        name: (t[:16, :16] if "linear.weight" in name else t[..., :16]).contiguous() for name, t in content.items()
    }
    with pytest.raises(ValueError, match="heads of hidden size 16, expected the base's 32"):
        import_heads(write(tmp_path / "in", content, {}), tmp_path / "back", base.name)
    content = {name: tensor[:100] if name.endswith("1.weight") else tensor for name, tensor in tensors().items()}
    content = {name: tensor.contiguous() for name, tensor in content.items()}
    with pytest.raises(ValueError, match="projections to 100 tokens, expected the base's 128"):
        import_heads(write(tmp_path / "in", content, {}), tmp_path / "back", base.name)


def test_our_own_directories_are_taken_over_with_their_tree(tmp_path, base):
    from interop_layouts import write_heads

    source = write_heads(tmp_path / "heads", base, design="hydra")
    import_heads(source, tmp_path / "back", base.name)
    for name in ("heads.safetensors", "tree.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
