"""Packaging rules: one import name, a light import, honest metadata."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")


def run_python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = "[name for name in ('torch', 'transformers', 'numpy', 'pydantic') if name in sys.modules]"


def test_importing_medusa_loads_nothing_heavy(tmp_path: Path) -> None:
    assert run_python(f"import sys, medusa; print(medusa.__version__, {HEAVY})", tmp_path) == "0.1.0 []"
    assert "torch" in run_python(f"import sys, medusa; medusa.DraftTree; print({HEAVY})", tmp_path)


HELP = f"""
import sys
from medusa.cli import main
sys.argv = ["medusa", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("heavy:", {HEAVY})
"""


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    assert run_python(HELP, tmp_path).splitlines()[-1] == "heavy: []"


def test_train_and_infer_install_inside_medusa(tmp_path: Path) -> None:
    for name in ("train", "infer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a decoy was imported')\n")
    code = "import medusa.train, medusa.infer; print(medusa.train.__name__, medusa.infer.__name__)"
    assert run_python(code, tmp_path) == "medusa.train medusa.infer"


@pytest.mark.parametrize(
    "owner, forbidden", [("medusa", ("train", "infer")), ("train", ("infer",)), ("infer", ("train",))]
)
def test_layers_do_not_import_each_other(owner: str, forbidden: tuple[str, ...], repo_root: Path) -> None:
    """medusa <- train and medusa <- infer; only the composition root, medusa/cli*.py, sees both."""
    for path in (repo_root / owner).rglob("*.py"):
        if owner == "medusa" and path.name.startswith("cli"):
            continue
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["from"], ["import"]):
                for other in forbidden:
                    wrong = (f"medusa.{other}", other, f".{other}", f"..{other}")
                    assert not words[1].startswith(tuple(f"{name}." for name in wrong)), f"{path}: {line}"
                    assert words[1] not in wrong, f"{path}: {line}"


def test_files_stay_readable(repo_root: Path) -> None:
    for folder in ("medusa", "train", "infer"):
        for path in (repo_root / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, f"{path} has grown over 400 lines; split it"


def test_version_is_written_once_more_at_most(repo_root: Path) -> None:
    import medusa

    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert project["version"] == medusa.__version__
    assert project["requires-python"] == ">=3.10"


def test_exports_and_unknown_names() -> None:
    import medusa

    assert medusa.DraftTree.chain(2).num_nodes == 3
    with pytest.raises(AttributeError, match="no attribute 'Medusa'"):
        medusa.Medusa  # noqa: B018
    assert set(medusa.__all__) <= set(dir(medusa))


def test_nothing_loads_code_from_files(repo_root: Path) -> None:
    """No pickle, no eval: checkpoints are safetensors and JSON; other people's `.pt` files are read as data only."""
    for folder in ("medusa", "train", "infer", "scripts"):
        for path in (repo_root / folder).rglob("*.py"):
            text = re.sub(r"torch\.load\([^()]*weights_only=True[^()]*\)", "", path.read_text())
            for needle in ("torch.load(", "import pickle", "pickle.load", " eval(", " exec(", "yaml.load("):
                assert needle not in text, f"{path} uses {needle.strip()}"
