"""Push to a Hub and load from it by name, against a stub of its API on loopback; in a process of its own, as tests are
offline otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from hub_stub import Hub
from interop_layouts import write_heads
from medusa import MedusaModel
from medusa.hub import find_heads, push_folder


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.server.shutdown()


def run_python(code, hub, tmp_path, **environment):
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache"),
                "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | settings | environment, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pushed_heads_load_by_name(tmp_path, base, hub):
    heads = write_heads(tmp_path / "heads", base, design="hydra")
    hub.token = "hf_secret"
    said = run_python(
        f"""
        from medusa.cli import run
        export = ["export", "--to", "hf", "--heads", {str(heads)!r}, "--out", "out"]
        assert run([*export, "--push-to-hub", "org/heads", "--private", "--revision", "v1"]) == 0
        """,
        hub, tmp_path, HF_TOKEN="hf_secret",
    )  # fmt: skip
    assert f"pushed: {hub.endpoint}/org/heads" in said and hub.private["org/heads"]
    pushed = hub.repositories["org/heads"]["v1"]
    assert pushed["heads.safetensors"] == (heads / "heads.safetensors").read_bytes()
    assert {"config.json", "tree.json", "README.md", "custom_generate/generate.py"} <= set(pushed)
    assert b"HEADS = 'org/heads'" in pushed["custom_generate/generate.py"]
    assert str(tmp_path).encode() not in pushed["custom_generate/generate.py"]
    code = """
        from medusa import MedusaModel
        from medusa.infer import generate
        options = {"revision": "v1", "pack": False}
        model = MedusaModel.from_pretrained("org/heads", token="hf_secret", **options)
        assert not (model.heads_dir / "custom_generate").exists()  # nothing that could be executed is fetched
        model.save_pretrained("saved")
        [answer] = generate(model, ["Hi"], max_new_tokens=8)
        for refused, options in (
            ("org/nothing", {"token": "hf_secret"}),
            ("org/heads", {"token": "hf_secret", "revision": "v9"}),
            ("org/heads2", {"token": "hf_wrong"}),
        ):
            try:
                MedusaModel.from_pretrained(refused, **options)
            except ValueError as error:
                assert refused in str(error) and "expected heads" in str(error), error
            else:
                raise AssertionError(refused)
        """
    run_python(code, hub, tmp_path)
    for name in ("heads.safetensors", "config.json", "tree.json"):
        assert (tmp_path / "saved" / name).read_bytes() == pushed[name], name
    num_requests = len(hub.requests)
    run_python(
        """
        from medusa import MedusaModel
        assert MedusaModel.from_pretrained("org/heads", revision="v1", pack=False).heads.config.design == "hydra"
        """,
        hub, tmp_path, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert len(hub.requests) == num_requests  # offline is offline


def test_a_refused_push_is_a_failure_with_the_directory_kept(tmp_path, base, hub):
    heads = write_heads(tmp_path / "heads", base)
    hub.token = "hf_secret"
    run_python(
        f"""
        from medusa.cli import run
        export = ["export", "--to", "vllm", "--heads", {str(heads)!r}, "--out", "out"]
        assert run([*export, "--push-to-hub", "org/heads"]) == 1
        assert run([*export[:-1], "out2", "--push-to-hub", "no-owner"]) == 2
        assert run([*export[:-1], "out3", "--private"]) == 2
        """,
        hub, tmp_path, HF_TOKEN="hf_wrong",
    )  # fmt: skip
    assert (tmp_path / "out" / "model.safetensors").exists() and not hub.repositories


def test_names_that_are_none_are_directories(tmp_path):
    assert find_heads(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="got revision 'v1' for a directory"):
        find_heads(tmp_path, revision="v1")
    with pytest.raises(ValueError, match="expected owner/name"):
        push_folder(tmp_path, "just-a-name")


def test_offline_a_name_that_is_not_in_the_cache_is_refused():
    with pytest.raises(ValueError, match="no-such/heads: got no directory of that name and no Hub repository"):
        find_heads("no-such/heads")


def test_save_pretrained_copies_bit_for_bit(tmp_path, base):
    heads = write_heads(tmp_path / "heads", base)
    model = MedusaModel.from_pretrained(heads)
    model.save_pretrained(tmp_path / "copy")
    for name in ("config.json", "heads.safetensors", "tree.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (heads / name).read_bytes()
    with pytest.raises(ValueError, match="where the heads were loaded from"):
        model.save_pretrained(heads)
    model.heads_dir = None
    with pytest.raises(ValueError, match="no directory was loaded for"):
        model.save_pretrained(tmp_path / "other")


def test_trust_is_passed_on_only_when_asked(tmp_path, base, monkeypatch):
    given = []

    def load(*_, **options):
        given.append(options["trust_remote_code"])
        raise ValueError("enough")

    monkeypatch.setattr("medusa.model.load_base_model", load)
    heads = write_heads(tmp_path / "heads", base)
    for trust in ({}, {"trust_remote_code": True}):
        with pytest.raises(ValueError, match="enough"):
            MedusaModel.from_pretrained(heads, **trust)
    assert given == [False, True]
