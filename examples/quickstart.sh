#!/usr/bin/env bash
# From a fresh machine to a comparison: environment, model, served variants, table + JSON + HTML report.
# Settings: PYTHON (python3), VENV (.venv), RESULTS (zyfa-results); further arguments go to `zyfa compare`.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
venv=${VENV:-.venv}
model=${RESULTS:-zyfa-results}/models/smollm2-hd128

"${PYTHON:-python3}" examples/setup_cpu.py --venv "$venv" --extras cpu
[ -f "$model/model.safetensors" ] || "$venv/bin/zyfa" model make smollm2-hd128 "$model"
"$venv/bin/zyfa" compare "$model" --out "${RESULTS:-zyfa-results}/smollm2-hd128" "$@"
