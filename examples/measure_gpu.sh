#!/usr/bin/env bash
# Every figure of README's that comes from a GPU, on this machine: what the kernels do, what a server does, what the text
# loses. Needs vLLM and ZYFA with its extras models and test in the environment of `python3`.
#
#     bash examples/measure_gpu.sh [STEP …]      # all: tests prefill write serving compare
#
# Settings: OUT (zyfa-results/gpu) gets the JSON, MODEL (made there) is the checkpoint that compare asks,
# MODELS (the three presets) are served with dummy weights, CONTEXT (8191) is the length of compare's windows.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-zyfa-results/gpu}
model=${MODEL:-$out/smollm2-hd128}
models=${MODELS:-mistral-7b-v0.3,qwen3-8b,deepseek-v2-lite}
context=${CONTEXT:-8191}
mkdir -p "$out"

tests() {
    python3 -m pytest tests/triton tests/engine/test_gpu.py -m gpu -q
}

prefill() {
    python3 examples/bench_prefill.py --json "$out/prefill.json"
}

write() {
    zyfa bench --parts write --out "$out/write"
}

serving() {
    zyfa bench --parts serving --models "$models" --serve lean,engine-fp8 --together --out "$out/serving"
}

compare() {
    [ -e "$model" ] || zyfa model make smollm2-hd128 "$model"
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
for step in "${steps[@]}"; do
    echo "== $step"
    "$step"
done
