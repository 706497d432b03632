"""What is exported is what the engine computes with; what it would load silently wrong is refused or prevented."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from interop_layouts import LAYOUTS, NUM_HEADS, save_tree, write_heads
from medusa.checkpoint import AdapterReference, load_heads
from medusa.cli import run
from medusa.interop.engines import ENGINES
from medusa.interop.export import export_heads
from medusa.interop.import_heads import import_heads
from medusa.interop.plain import check_fill, plain_heads, widen
from tiny_models import save_tiny_base

PLAIN = [name for name in LAYOUTS if name.startswith("medusa, ")]
V1_ONLY_ONE_LAYER = ("medusa-v1", "medusa-v2")


def refused(engine, layout):
    settings = LAYOUTS[layout]
    if engine in V1_ONLY_ONE_LAYER and settings.get("num_layers") == 2:
        return True
    return engine == "medusa-v2" and settings != {}


EXPORTED = [(engine, layout) for engine in ENGINES for layout in PLAIN if not refused(engine, layout)]


def edit(folder, drop=(), **changes):
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if k not in drop}))


def edit_tensors(folder, change):
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def export(tmp_path, base):
    """export(engine, **layout) -> the exported directory."""

    def make(engine, dtype=None, tree=True, **layout):
        heads = write_heads(tmp_path / "heads", base, tree=tree, **layout)
        return export_heads(heads, engine, tmp_path / "out", dtype=dtype).folder

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine, layout", EXPORTED)
def test_round_trips_are_bitwise(tmp_path, base, engine, layout, dtype):
    heads = write_heads(tmp_path / "heads", base, dtype=dtype, **LAYOUTS[layout])
    export_heads(heads, engine, tmp_path / "out")
    done = import_heads(tmp_path / "out", tmp_path / "back", base.name)
    (before, info), (after, info_after) = load_heads(heads), load_heads(tmp_path / "back")
    assert after.config == before.config and info_after.base_model == info.base_model and not done.notes
    assert (tmp_path / "back" / "heads.safetensors").read_bytes() == (heads / "heads.safetensors").read_bytes()


def engine_logits(folder, hidden):
    """As vLLM 0.32's Medusa computes them, out of the files alone: [K, n, V]."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    logits = []
    for k in range(config["num_heads"]):
        x = hidden
        for j in range(config["num_hidden_layers"]):
            bias = tensors[f"blocks.{k}.layers.{j}.bias"] if config.get("medusa_fc_bias") else None
            x = x + F.silu(F.linear(x, tensors[f"blocks.{k}.layers.{j}.weight"], bias))
        logits.append(F.linear(x, tensors[f"lm_heads.{0 if config['original_lm_head'] else k}.weight"]))
    return torch.stack(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", PLAIN)
def test_the_engine_guesses_what_our_heads_guess(tmp_path, base, layout, dtype):
    heads_dir = write_heads(tmp_path / "heads", base, dtype=dtype, **LAYOUTS[layout])
    folder = export_heads(heads_dir, "vllm", tmp_path / "out").folder
    heads, _ = load_heads(heads_dir)
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    hidden = torch.randn(200, base.hidden_size).to(dtype)
    with torch.no_grad():
        ours = heads.draft_to_base(heads(hidden).argmax(dim=-1))
    assert torch.equal(engine_logits(folder, hidden).argmax(dim=-1), ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_widened_rows_are_never_the_first_guess(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=generator).to(dtype) + 0.5  # all alike: many states dislike every row
    ids = torch.arange(0, 100, 2)
    wide = widen(weight, ids, 100, 1)
    states = torch.randn(4000, 16, generator=generator).to(dtype)
    assert (wide[ids] == weight).all() and (states @ wide.T).argmax(dim=-1).remainder(2).eq(0).all()
    zeros = torch.zeros_like(wide)
    zeros[ids] = weight
    assert (states @ zeros.T).argmax(dim=-1).remainder(2).ne(0).any()  # what the mean is there for


def test_rows_that_cannot_be_told_from_their_mean_are_refused():
    with pytest.raises(ValueError, match="draft vocabulary of 1 tokens whose best 1 guesses"):
        widen(torch.randn(1, 8), torch.tensor([3]), 10, 1)
    weight = torch.randn(20, 8)
    check_fill(weight, weight.mean(dim=0), 2)
    with pytest.raises(ValueError, match="best 15 guesses are not all certain"):
        check_fill(weight, weight.mean(dim=0), 15)


def test_a_tree_wider_than_what_stands_above_the_mean_is_refused(tmp_path, base):
    heads = write_heads(tmp_path / "heads", base, draft=4)
    export_heads(heads, "vllm", tmp_path / "out")  # first guesses only
    with pytest.raises(ValueError, match="draft vocabulary of 4 tokens whose best [234] guesses are not all certain"):
        export_heads(heads, "trtllm", tmp_path / "out2")


def test_values_too_large_for_the_type_are_refused(tmp_path, base):
    heads, _ = load_heads(write_heads(tmp_path / "heads", base))
    with torch.no_grad():
        heads.blocks[0][0].linear.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="float16 cannot hold; use --dtype bfloat16"):
        plain_heads(heads, base.lm_head_weight, torch.float16)


def test_the_type_is_the_one_that_was_asked_for(export):
    tensors = load_file(export("vllm", torch.bfloat16) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


# The silent failures, one test each.


def check(engine, folder, message):
    with pytest.raises(ValueError, match=message):
        ENGINES[engine].validate(folder)


def test_vllm_keeps_the_biases(export):
    folder = export("vllm")
    assert json.loads((folder / "config.json").read_text())["medusa_fc_bias"] is True
    edit(folder, drop=["medusa_fc_bias"])
    check("vllm", folder, "without which vLLM drops all biases")


def test_vllm_never_runs_without_an_lm_head(export):
    folder = export("vllm")
    content = json.loads((folder / "config.json").read_text())
    assert content["original_lm_head"] is True and "lm_heads.0.weight" in load_file(folder / "model.safetensors")
    edit_tensors(folder, lambda tensors: tensors.pop("lm_heads.0.weight"))
    check("vllm", folder, "got no tensor lm_heads.0.weight")


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "medusa_num_layers"])
def test_vllm_finds_one_count_of_heads_and_one_of_layers(export, key):
    folder = export("vllm")
    edit(folder, **{key: 2})
    check("vllm", folder, f"got {key}, with which vLLM overwrites")


def test_vllm_gets_no_token_map(export):
    folder = export("vllm", draft=64)
    assert not any("token_map" in name for name in load_file(folder / "model.safetensors"))
    edit_tensors(folder, lambda tensors: tensors.update(token_map=torch.arange(64)))
    check("vllm", folder, "got a token_map, which vLLM does not load")


def test_vllm_gets_no_truncated_vocabulary(export):
    folder = export("vllm", draft=64)
    edit(folder, truncated_vocab_size=64)
    check("vllm", folder, "truncated_vocab_size")


def test_vllm_gets_hidden_and_vocabulary_size(export):
    folder = export("vllm")
    edit(folder, drop=["hidden_size"])  # 4096 is what it takes then
    check("vllm", folder, "got no hidden_size")


@pytest.mark.parametrize("key", ["architectures", "model_type"])
def test_tgi_finds_nothing_that_makes_it_leave_the_heads_out(export, key):
    folder = export("tgi")
    edit(folder, **{key: ["LlamaForCausalLM"]})
    check("tgi", folder, f"got {key}, which TGI takes for something else")


def test_tgi_is_not_given_another_revision(tmp_path, base, monkeypatch):
    heads = write_heads(tmp_path / "heads", base)
    content = json.loads((heads / "config.json").read_text())
    content["base_model"]["revision"] = "v2"
    (heads / "config.json").write_text(json.dumps(content))
    monkeypatch.setattr("medusa.interop.export.load_base_model", lambda *_, **__: replace(base, name="org/model"))
    with pytest.raises(ValueError, match="got heads for the base's revision 'v2', expected main"):
        export_heads(heads, "tgi", tmp_path / "out")


def test_tgi_v2_has_one_layer_only(export):
    folder = export("tgi", num_layers=2)
    edit_tensors(folder, lambda tensors: [tensors.pop(f"{k}.2.weight") for k in range(NUM_HEADS)])
    check("tgi", folder, "got 2 layers without projections")


@pytest.mark.parametrize("engine, name", [("tgi", "1.0.linear.bias"), ("trtllm", "1.0.linear.bias")])
def test_biases_are_mandatory(export, engine, name):
    folder = export(engine)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    check(engine, folder, f"got no tensor {name}")


def test_trtllm_gets_the_calibrated_tree_or_nothing(tmp_path, base, export):
    folder = export("trtllm")
    choices = json.loads((folder / "medusa_choices.json").read_text())
    assert choices and sorted(map(len, choices)) == list(map(len, choices))
    heads = write_heads(tmp_path / "bare", base, tree=False)
    with pytest.raises(ValueError, match="without tree.json, whose tree it needs; run `medusa calibrate`"):
        export_heads(heads, "trtllm", tmp_path / "out2")
    save_tree(heads, max_nodes=70)
    with pytest.raises(ValueError, match="got a tree of 69 drafted tokens, expected 1 to 63"):
        export_heads(heads, "trtllm", tmp_path / "out2")
    (folder / "medusa_choices.json").write_text("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]")
    check("trtllm", folder, "has depth 4, but there are 3 heads")


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_mlc_is_told_the_sizes(export, key):
    folder = export("mlc")
    edit(folder, drop=[key])
    check("mlc", folder, f"got no {key}")


def test_medusa_v1_is_a_whole_model_with_its_own_count(tmp_path, export, base):
    """Heads alone would be given 5 heads by its loader, whatever they have."""
    from transformers import AutoModelForCausalLM

    folder = export("medusa-v1")
    content = json.loads((folder / "config.json").read_text())
    assert content["medusa_num_heads"] == NUM_HEADS and content["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, base.model(input_ids=ids).logits)


def test_medusa_v1_ties_layers_so_it_gets_one(export):
    with pytest.raises(ValueError, match="expected 1: its loader gives a head one block for all of them"):
        export("medusa-v1", num_layers=2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 16}, "a head_dim of its own"),
        ({"attention_bias": True}, "attention biases"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
            "rope of the kind llama3",
        ),
    ],
)  # fmt: skip
def test_medusa_v1_gets_no_base_that_it_computes_wrong(tmp_path, changes, message):
    from medusa.base_model import load_base_model

    base = load_base_model(str(save_tiny_base(tmp_path / "base", **changes)))
    heads = write_heads(tmp_path / "heads", base)
    with pytest.raises(ValueError, match=message):
        export_heads(heads, "medusa-v1", tmp_path / "out")


def test_medusa_v1_keeps_the_rope(tmp_path):
    from medusa.base_model import load_base_model

    rope = {"rope_type": "default", "rope_theta": 123_456.0}
    base = load_base_model(str(save_tiny_base(tmp_path / "base", rope_parameters=rope, tie_word_embeddings=True)))
    folder = export_heads(write_heads(tmp_path / "heads", base), "medusa-v1", tmp_path / "out").folder
    content = json.loads((folder / "config.json").read_text())
    assert content["rope_theta"] == 123_456.0 and "rope_parameters" not in content
    edit(folder, rope_parameters=rope)
    check("medusa-v1", folder, "got rope_parameters")


@pytest.mark.parametrize("layout", [{"lm_head": "own"}, {"draft": 64}])
def test_medusa_v2_has_no_place_for_projections(export, layout):
    with pytest.raises(ValueError, match="residual blocks only.*Instead export --to tgi or medusa-v1"):
        export("medusa-v2", **layout)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "hf"])
@pytest.mark.parametrize("layout", ["markov", "hydra", "medusa with fused layers"])
def test_what_an_engine_cannot_express_is_refused_with_an_alternative(tmp_path, base, engine, layout):
    heads = write_heads(tmp_path / "heads", base, **LAYOUTS[layout])
    with pytest.raises(ValueError, match="last hidden state alone. Instead use"):
        export_heads(heads, engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_heads_of_an_adapted_base_need_the_merged_one(tmp_path, base):
    heads = write_heads(tmp_path / "heads", base, adapter=AdapterReference("a", "b"))
    with pytest.raises(ValueError, match="expected that base merged"):
        export_heads(heads, "vllm", tmp_path / "out")


def test_another_base_is_refused(tmp_path, base):
    heads = write_heads(tmp_path / "heads", base)
    other = save_tiny_base(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="which the heads were trained on"):
        export_heads(heads, "vllm", tmp_path / "out", base=str(other))


def test_trtllm_takes_families_that_it_knows(tmp_path):
    from medusa.base_model import load_base_model

    base = load_base_model(str(save_tiny_base(tmp_path / "base", "olmo2")))
    with pytest.raises(ValueError, match="a base of the family olmo2, expected one of llama"):
        export_heads(write_heads(tmp_path / "heads", base), "trtllm", tmp_path / "out")


# Files.


@pytest.mark.parametrize("engine", ["vllm", "mlc", "medusa-v1"])
def test_large_tensors_are_sharded_and_come_back(tmp_path, base, engine):
    heads = write_heads(tmp_path / "heads", base, lm_head="own")
    folder = export_heads(heads, engine, tmp_path / "out", max_shard_bytes=20_000).folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3 and set(index["weight_map"].values()) == {path.name for path in shards}
    assert all(path.stat().st_size < 22_000 for path in shards)
    import_heads(folder, tmp_path / "back", base.name)
    assert (tmp_path / "back" / "heads.safetensors").read_bytes() == (heads / "heads.safetensors").read_bytes()


def test_nothing_is_overwritten_and_nothing_is_left_half_written(tmp_path, base, monkeypatch):
    heads, out = write_heads(tmp_path / "heads", base), tmp_path / "out"
    monkeypatch.setattr(type(ENGINES["vllm"]), "validate", lambda *_: (_ for _ in ()).throw(ValueError("no good")))
    with pytest.raises(ValueError, match="no good"):
        export_heads(heads, "vllm", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads"]
    monkeypatch.undo()
    out.mkdir()
    export_heads(heads, "vllm", out)
    with pytest.raises(ValueError, match="got something there already"):
        export_heads(heads, "vllm", out)


def test_the_card_says_what_is_known_and_no_more(tmp_path, base):
    heads = write_heads(tmp_path / "heads", base)
    (heads / "training").mkdir()
    (heads / "training" / "config.yaml").write_text("data: {path: [talks.jsonl]}\noptim: {lr: 0.001, epochs: 2}\n")
    summary = {"steps": 1200, "tokens": 34567, "held_out": {"head_top1": [0.5, 0.25, 0.125]}}
    (heads / "training" / "summary.json").write_text(json.dumps(summary))
    card = (export_heads(heads, "trtllm", tmp_path / "out").folder / "README.md").read_text()
    for said in ("talks.jsonl", "lr 0.001, epochs 2", "1,200 steps, 34,567 tokens", "50.0%, 25.0%, 12.5%",
                 "on 200 calibration positions", "calibrated tree: ", " tokens a step", "calibrated on: a test",
                 "trtllm-build", "TensorRT-LLM up to 1.2", f"base model: `{base.name}`"):  # fmt: skip
        assert said in card, said
    bare = write_heads(tmp_path / "bare", base, tree=False)
    card = (export_heads(bare, "vllm", tmp_path / "bare-out").folder / "README.md").read_text()
    assert "Training" not in card and "Accuracy" not in card and "license" not in card
    assert "vllm serve" in card and '"num_speculative_tokens": 3' in card


# The commands.


def test_the_commands_do_it_and_say_so(tmp_path, base, capsys):
    heads, out, back = write_heads(tmp_path / "heads", base, draft=64), tmp_path / "out", tmp_path / "back"
    assert run(["export", "--to", "tgi", "--heads", str(heads), "--out", str(out), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "draft vocabulary of 64 widened to 128 tokens" in said and "loaded by: Text Generation Inference" in said
    assert run(["import", "--from", str(out), "--out", str(back), "--base", base.name]) == 0
    assert "3 heads of 1 layer(s), shared lm_head, torch.bfloat16" in capsys.readouterr().out
    assert run(["export", "--to", "tgi", "--heads", str(heads), "--out", str(out)]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "import"])
def test_help_names_every_option(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    options = {"export": ["--to", "--heads", "--out", "--base", "--dtype", "--push-to-hub"], "import": ["--from"]}
    assert all(option in text for option in options[command])
