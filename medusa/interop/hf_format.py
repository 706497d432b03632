"""Our own directory as a Hub repository: what it held, with `custom_generate/generate.py`, which Transformers runs.

That file is all that is executed, and only with `trust_remote_code=True`; it imports the installed package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..adapter import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from ..calibration import Calibration
from ..checkpoint import load_heads, save_heads
from ..config import HeadsConfig
from .engine import Engine, Source

GENERATE_FILE = Path("custom_generate") / "generate.py"
REQUIREMENTS_FILE = Path("custom_generate") / "requirements.txt"


def generate_code(heads: str) -> str:
    """heads: where `generate` finds them, unless it is told: a Hub repository or a directory."""
    lines = (
        '"""Tree decoding with Medusa heads: `model.generate(..., custom_generate=..., trust_remote_code=True)`."""',
        "",
        "from medusa.infer.custom_generate import generate_with_heads",
        "",
        f"HEADS = {heads!r}  # or pass heads=... to generate",
        "",
        "",
        "def generate(model, heads=None, **arguments):",
        '    """Tokens as `model.generate` would choose them, drafted by the heads and verified by the model."""',
        "    return generate_with_heads(model, heads or HEADS, **arguments)",
    )
    return "\n".join(lines) + "\n"


class HfEngine(Engine):
    name = "hf"
    title = "Transformers with this package"
    versions = "Transformers 5.16 and up, this package installed (run in the tests)"

    def check(self, config: HeadsConfig) -> None:
        """All of ours."""

    def write(self, source: Source, folder: Path) -> list[str]:
        save_heads(folder, source.heads, source.info, source.dtype)
        notes = []
        if source.calibration:
            source.calibration.save(folder / source.info.tree)
        else:
            notes.append("no tree yet: run `medusa calibrate` on the machine that serves, else a chain is drafted")
        if source.info.adapter:
            (folder / ADAPTER_FOLDER).mkdir()
            for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
                shutil.copyfile(source.folder / ADAPTER_FOLDER / name, folder / ADAPTER_FOLDER / name)
        (folder / GENERATE_FILE).parent.mkdir()
        (folder / GENERATE_FILE).write_text(
            generate_code(source.repo_id or str(source.out.resolve())), encoding="utf-8"
        )
        (folder / REQUIREMENTS_FILE).write_text("medusa-decoding\n", encoding="utf-8")
        return notes

    def validate(self, folder: Path) -> None:
        info = load_heads(folder)[1]
        if (folder / info.tree).exists():
            Calibration.load(folder / info.tree)
        compile((folder / GENERATE_FILE).read_text(encoding="utf-8"), str(GENERATE_FILE), "exec")

    def serve(self, folder: str, source: Source) -> str:
        return (
            f"medusa serve --heads {folder}\n"
            f"medusa generate --heads {folder} --prompt 'What is gravity?'\n"
            "# or in Python, with Transformers' own model:\n"
            f"# model.generate(**inputs, custom_generate={folder!r}, trust_remote_code=True)"
        )
