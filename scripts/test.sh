#!/usr/bin/env bash
# Sets up what is missing, then checks style and types and runs every test that needs no GPU.
#
#   scripts/test.sh [PYTEST ARGUMENTS]     for example: scripts/test.sh -k tree -x
#
# VENV, PYTHON, TORCH_VERSION, TORCH_INSTALL: see scripts/setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export VENV="${VENV:-.venv}"
scripts/setup_env.sh train,dev,demo
python="$VENV/bin/python"

say() { printf '\n== %s\n' "$*"; }
say "ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .
say "mypy"
"$python" -m mypy
say "demo model"
"$python" scripts/demo_model.py --out runs/demo-model
say "tests"
# A process a core with a thread each: two of torch's threads on a core that others use are slower than one.
workers="$("$python" -c 'import os; print(min(4, os.cpu_count() or 1))')"
OMP_NUM_THREADS=1 "$python" -m pytest -m "not gpu and not vllm" --durations=15 -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
