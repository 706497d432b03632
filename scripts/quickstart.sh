#!/usr/bin/env bash
# From nothing to a real model that decodes with heads of its own and says the very same text: sets up an environment,
# fetches the demo model, makes fresh data with it, trains heads, chooses the draft tree for this machine, benchmarks,
# and answers.
#
#   scripts/quickstart.sh                 train heads
#   scripts/quickstart.sh --pretrained    take the heads that the project ships for this model (heads/)
#
# About 20 minutes on two CPU cores, downloads aside. Interrupt it whenever you like and run it again: finished stages
# are not redone, and the one that was interrupted goes on where it stopped. Everything lands in runs/.
#
# VENV, PYTHON, TORCH_VERSION, TORCH_INSTALL: see scripts/setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export VENV="${VENV:-.venv}"
case "${1:-}" in
    "") run=runs/quickstart pretrained=0 ;;
    --pretrained) run=runs/pretrained pretrained=1 ;;
    *)
        echo "error: got $*, expected nothing or --pretrained" >&2
        exit 2
        ;;
esac
heads=$run/heads
medusa="$VENV/bin/medusa"

# stage NAME COMMAND...: run the command unless it, and every stage before it, has finished already.
redo=0
stage() {
    local name="$1" stamp="$run/.finished-${1// /-}"
    shift
    if [ "$redo" = 0 ] && [ -e "$stamp" ]; then
        printf '== %s: finished before\n' "$name"
        return
    fi
    redo=1
    rm -f "$stamp"
    printf '\n== %s\n   %s\n' "$name" "$*"
    "$@"
    touch "$stamp"
}

# As much of the demo data as the base can go through in four minutes on this machine: all of it on a fast one.
fit_data() {
    "$VENV/bin/python" scripts/fit_data.py --config configs/train/quickstart.yaml --seconds 240 >$run/limit
    cat $run/limit
}

take_heads() {
    mkdir -p $heads
    cp heads/smollm2-135m-instruct/config.json heads/smollm2-135m-instruct/heads.safetensors $heads/
}

started=$SECONDS
scripts/setup_env.sh train,demo,plot
mkdir -p "$run"

stage "demo model" "$VENV/bin/python" scripts/demo_model.py --out runs/demo-model
stage "fresh data" "$medusa" distill --base runs/demo-model --self-prompt 96 --seed 1 --max-new-tokens 128 \
    --out $run/fresh.jsonl
if [ $pretrained = 1 ]; then
    stage "take heads" take_heads
else
    stage "fit data" fit_data
    stage "train" "$medusa" train --config configs/train/quickstart.yaml $(cat $run/limit)
fi
stage "calibrate" "$medusa" calibrate --heads $heads --data $run/fresh.jsonl
stage "tree picture" "$medusa" inspect tree --heads $heads --png $run/tree.png
stage "benchmark" "$medusa" bench --heads $heads --prompts data/prompts.jsonl --limit 8 --max-new-tokens 96 \
    --json $run/bench.json --plot $run/bench.png

printf '\n== the same answer, with and without heads\n'
"$medusa" generate --heads $heads --prompt "Why do leaves change colour in autumn?" --max-new-tokens 128 --compare
printf '\nDone in %d minutes. Heads: %s\n' $(((SECONDS - started + 59) / 60)) "$heads"
printf 'Ask something: %s generate --heads %s --prompt "What is gravity?"\n' "$medusa" "$heads"
