#!/usr/bin/env bash
# What README says of GPUs, measured on this machine: tests, what the kernels do, what a server does, what the text loses.
# Needs vLLM, and ZYFA with its extras models and test, in the environment of PYTHON.
#
#     bash examples/measure_gpu.sh [STEP …]      # all: tests prefill write serving compare
#
# Settings: PYTHON (python3), OUT (zyfa-results/gpu) gets the JSON, MODEL (made there) is the checkpoint that compare asks,
# MODELS (the three presets) are served with dummy weights, CONTEXT (8191) is the length of compare's windows. Relative
# paths are of the directory it is called in. A step that fails is named at the end, and the others still run.
set -uo pipefail
here=$PWD
cd "$(dirname "$0")/.."
absolute() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; }
python=${PYTHON:-python3}
out=$(absolute "${OUT:-zyfa-results/gpu}")
model=$(absolute "${MODEL:-$out/smollm2-hd128}")
models=${MODELS:-mistral-7b-v0.3,qwen3-8b,deepseek-v2-lite}
context=${CONTEXT:-8191}

zyfa() { "$python" -m zyfa_backend.cli "$@"; }

tests() {
    "$python" -m pytest tests/triton tests/engine/test_gpu.py -m gpu -q
}

prefill() {
    "$python" examples/bench_prefill.py --json "$out/prefill.json"
}

write() {
    zyfa bench --parts write --out "$out/write"
}

serving() {
    zyfa bench --parts serving --models "$models" --serve lean,engine-fp8 --together --out "$out/serving"
}

compare() {
    [ -e "$model" ] || zyfa model make smollm2-hd128 "$model" || return
    zyfa compare "$model" --context "$context" --tokens "$((3 * context))" --out "$out/compare"
}

steps=("$@")
[ $# -gt 0 ] || steps=(tests prefill write serving compare)
for step in "${steps[@]}"; do
    case $step in
        tests | prefill | write | serving | compare) ;;
        *) echo "there is no step '$step'; choose from tests prefill write serving compare" >&2 && exit 2 ;;
    esac
done
mkdir -p "$out" || exit
failed=()
for step in "${steps[@]}"; do
    echo "== $step"
    "$step" || failed+=("$step")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2 && exit 1; }
