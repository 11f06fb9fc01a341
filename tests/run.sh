#!/usr/bin/env bash
# Every test, from a fresh machine: environment, style, types, unit tests, engine tests.
# SGLang's tests run in an environment of their own, since it pins other versions than vLLM.
# Settings: PYTHON (python3), VENV (.venv), SGLANG_VENV (.venv-sglang); arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
venv=${VENV:-.venv}
sglang=${SGLANG_VENV:-.venv-sglang}

"${PYTHON:-python3}" examples/setup_cpu.py --venv "$venv" --extras cpu,test,gfx950
"$venv/bin/ruff" check .
"$venv/bin/mypy" zyfa_backend kernels/zyfa_kernels
"$venv/bin/python" -m pytest "$@"
"${PYTHON:-python3}" examples/setup_sglang_cpu.py --venv "$sglang" --extras models,test
VLLM_PYTHON="$venv/bin/python" "$sglang/bin/python" -m pytest tests/sglang "$@"
