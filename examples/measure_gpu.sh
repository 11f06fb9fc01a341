#!/usr/bin/env bash
# What README says of vLLM on GPUs, measured on this machine: tests, what kernels and a server do, what the text loses.
# Needs vLLM, and ZYFA with its extras models and test, in the environment of PYTHON.
#
#     bash examples/measure_gpu.sh [STEP …]      # all: tests prefill kernel write captured serving compare
#     PYTHON=… bash examples/measure_gpu.sh sglang      # the tests of SGLang, whose environment is another
#
# Settings: PYTHON (python3), OUT (zyfa-results/gpu) gets the JSON. kernel: SHAPES and LENGTHS (those that README quotes).
# kernel and captured: WARMUPS (50) and LAUNCHES (20, at least 10) of each contender, SUSTAIN (1), the seconds that each
# runs alone. captured: INPUT, an .npz of `zyfa capture`; left out without it. serving: MODELS (the three presets), with
# dummy weights. compare: MODEL (made in OUT) is the checkpoint, CONTEXT (8191) the length of a window: that model holds
# 8192 tokens, of which a server generates one. Relative paths are of the directory it is called in. A step that fails is
# named at the end, and the others still run.
set -uo pipefail
here=$PWD
cd "$(dirname "$0")/.."
absolute() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; }
python=${PYTHON:-python3}
out=$(absolute "${OUT:-zyfa-results/gpu}")
model=$(absolute "${MODEL:-$out/smollm2-hd128}")
models=${MODELS:-mistral-7b-v0.3,qwen3-8b,deepseek-v2-lite}
context=${CONTEXT:-8191}
shapes=${SHAPES:-hd128,hd128:32/8,mla}
lengths=${LENGTHS:-1024,4096,16384,32768}
input=${INPUT:+$(absolute "$INPUT")}
few=(--warmups "${WARMUPS:-50}" --launches "${LAUNCHES:-20}" --sustain "${SUSTAIN:-1}")

zyfa() { "$python" -m zyfa_backend.cli "$@"; }

tests() {
    command -v compute-sanitizer >/dev/null || echo "compute-sanitizer is not on this machine; the tests that need it fail"
    "$python" -m pytest tests/triton tests/engine/test_gpu.py -q
}

sglang() {
    "$python" -m pytest tests/sglang -m "not engine or gpu" --device cuda -q  # the other engines are those of a CPU
}

prefill() {
    "$python" examples/bench_prefill.py --json "$out/prefill.json"
}

kernel() {
    zyfa bench --parts kernel,sustained --shapes "$shapes" --seq "$lengths" "${few[@]}" --out "$out/kernel"
}

captured() {
    [ -n "$input" ] || { echo "captured needs INPUT, an .npz of \`zyfa capture\`" >&2 && return 1; }
    zyfa bench --parts captured --input "$input" "${few[@]}" --out "$out/captured"
}

write() {
    zyfa bench --parts write --out "$out/write"
}

serving() {
    zyfa bench --parts serving --models "$models" --serve lean,engine-fp8 --together \
        --requests 4 --concurrency 2 --out "$out/serving"
}

compare() {
    [ -e "$model" ] || zyfa model make smollm2-hd128 "$model" || return
    zyfa compare "$model" --context "$context" --tokens "$((3 * context))" --out "$out/compare"
}

steps=("$@")
[ $# -gt 0 ] || steps=(tests prefill kernel write ${input:+captured} serving compare)
known="tests sglang prefill kernel write captured serving compare"
for step in "${steps[@]}"; do
    [[ " $known " == *" $step "* ]] || { echo "there is no step '$step'; choose from $known" >&2 && exit 2; }
done
mkdir -p "$out" || exit
failed=()
for step in "${steps[@]}"; do
    echo "== $step"
    "$step" || failed+=("$step")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2 && exit 1; }
