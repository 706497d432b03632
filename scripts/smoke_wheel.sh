#!/usr/bin/env bash
# Installs a wheel into an environment of its own and uses it from a folder that holds decoys named like our folders.
#
#   scripts/smoke_wheel.sh dist/medusa_decoding-0.1.0-py3-none-any.whl
#
# Dependencies (torch is large) are borrowed from VENV, by default .venv, through a .pth file; medusa itself is not.
set -euo pipefail
wheel="$(realpath "${1:?usage: scripts/smoke_wheel.sh WHEEL}")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(realpath -s "${VENV:-.venv}")/bin/python"

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
site="$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# Paths added by a .pth file are not searched for further .pth files, so the editable install there stays out.
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"
"$scratch/venv/bin/python" -m pip install --quiet --no-deps --ignore-installed "$wheel"

mkdir "$scratch/empty"
cd "$scratch/empty"
for name in train infer; do echo "raise SystemExit('the decoy $name.py was imported')" >"$name.py"; done

"$scratch/venv/bin/medusa" --help >help.txt || { cat help.txt; exit 1; }
"$scratch/venv/bin/python" -m medusa --help >/dev/null
SITE="$site" "$scratch/venv/bin/python" - <<'PY'
import os
import sys
from importlib import import_module
from importlib.metadata import files, version

sys.path.insert(0, "")
for name in ("medusa", "medusa.train", "medusa.infer", "medusa.train.config", "medusa.tree", "medusa.interop.export"):
    path = import_module(name).__file__
    assert path.startswith(os.environ["SITE"]), f"{name} came from {path}, not from the wheel"
tops = {file.parts[0] for file in files("medusa-decoding")} - {"..", "__pycache__"}
assert {top for top in tops if not top.endswith(".dist-info")} == {"medusa"}, f"the wheel installs {tops}"
installed = set(map(str, files("medusa-decoding")))
for needed in ("medusa/py.typed", "medusa/infer/server/app.py", "medusa/infer/server/playground/index.html"):
    assert needed in installed, f"the wheel has no {needed}"
print(f"wheel of medusa-decoding {version('medusa-decoding')}: works from a folder with decoys, installs `medusa` only")
PY
