#!/usr/bin/env bash
# Makes the virtual environment that the other scripts use. Does nothing when it is up to date; safe to interrupt.
#
#   scripts/setup_env.sh EXTRAS            for example: scripts/setup_env.sh train,dev,demo
#
# Environment variables
#   VENV            folder of the environment (default: .venv in the repository)
#   PYTHON          interpreter to build it with (default: the first of python3, python3.13 ... python3.10 that is >= 3.10)
#   TORCH_VERSION   torch release to install (default: 2.13.0, the one that the tests run on)
#   TORCH_INSTALL   arguments of `pip install` that fetch torch instead, e.g. "torch==2.13.0 --index-url URL" with
#                   PyTorch's index for your CUDA release, or for CPU-only builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXTRAS="${1:?usage: scripts/setup_env.sh EXTRAS (for example train,dev,demo)}"
VENV="${VENV:-.venv}"
TORCH_VERSION="${TORCH_VERSION:-2.13.0}"
TORCH_INSTALL="${TORCH_INSTALL:-}"

say() { printf '[setup] %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        # Run it: a shim can be on the PATH and have no interpreter behind it.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no usable Python: tried ${PYTHON:-python3 and python3.13 to python3.10}, need 3.10 or newer with venv and" \
        "ensurepip (Debian: apt-get install python3-venv); set PYTHON to one"
}

make_venv() {
    if [ -e "$VENV/.created" ] && "$VENV/bin/python" -c 'import pip' 2>/dev/null; then return; fi
    if [ -d "$VENV" ] && [ -n "$(ls -A "$VENV")" ] && [ ! -e "$VENV/pyvenv.cfg" ]; then
        fail "VENV is $VENV, a folder that holds something else; choose another or empty it"
    fi
    local python
    python="$(find_python)"
    say "creating $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
    touch "$VENV/.created"
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

install_torch() {
    if [ -n "$TORCH_INSTALL" ]; then
        say "installing torch as TORCH_INSTALL says: $TORCH_INSTALL"
        # shellcheck disable=SC2086  # it is a list of arguments
        "$VENV/bin/python" -m pip install $TORCH_INSTALL
        return
    fi
    if ! has_nvidia_gpu; then
        say "no NVIDIA GPU: looking for a CPU build of torch $TORCH_VERSION"
        if "$VENV/bin/python" -m pip install "torch==$TORCH_VERSION+cpu" 2>/dev/null; then return; fi
        say "pip's index has no separate CPU build. On Linux the ordinary one can bring gigabytes of CUDA libraries with it;"
        say "to avoid that, interrupt and set TORCH_INSTALL (see the head of scripts/setup_env.sh)."
    fi
    "$VENV/bin/python" -m pip install "torch==$TORCH_VERSION"
}

hash_of() { "$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }

# step STAMP KEY COMMAND...: run the command unless the stamp says that it ended well with the same key.
step() {
    local stamp="$VENV/.stamp-$1" key="$2"
    shift 2
    if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then return; fi
    rm -f "$stamp"
    "$@"
    printf '%s\n' "$key" >"$stamp"
    changed=1
}

install_project() {
    say "installing medusa-decoding with extras: $EXTRAS"
    "$VENV/bin/python" -m pip install -e ".[$EXTRAS]" | sed '/already satisfied/d'
}

changed=0
make_venv
torch_key="$(printf '%s|%s' "$TORCH_VERSION" "$TORCH_INSTALL" | hash_of)"
project_key="$({ printf '%s|%s|%s|' "$torch_key" "$EXTRAS" "$PWD"; cat pyproject.toml; } | hash_of)"
step torch "$torch_key" install_torch
step "project-${EXTRAS//,/-}" "$project_key" install_project
if [ "$changed" = 1 ]; then say "ready: $VENV"; fi
