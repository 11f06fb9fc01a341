#!/usr/bin/env bash
# Every test, from a fresh machine: environment, style, types, unit tests, engine tests; a process a core, and what
# measures time alone. SGLang's tests run in an environment of their own, since it pins other versions than vLLM.
# Settings: PYTHON (python3), VENV (.venv), SGLANG_VENV (.venv-sglang), WORKERS (the cores, 4 at most, since each may
# hold two servers); arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
venv=${VENV:-.venv}
sglang=${SGLANG_VENV:-.venv-sglang}
speed=tests/engine/test_speed.py
# Slow files come first, and a file's tests share the servers that they start.
cores=$(nproc)
spread=(-n "${WORKERS:-$((cores < 4 ? cores : 4))}" --dist loadfile --no-loadscope-reorder)

"${PYTHON:-python3}" examples/setup_cpu.py --venv "$venv" --extras cpu,test,gfx950
"$venv/bin/ruff" check .
"$venv/bin/mypy" zyfa_backend kernels/zyfa_kernels
"$venv/bin/python" -m pytest "${spread[@]}" --ignore "$speed" "$@"
"$venv/bin/python" -m pytest "$speed" "$@" || [ $? -eq 5 ] # 5: the arguments leave none of them
"${PYTHON:-python3}" examples/setup_sglang_cpu.py --venv "$sglang" --extras models,test
VLLM_PYTHON="$venv/bin/python" "$sglang/bin/python" -m pytest tests/sglang "${spread[@]}" "$@"
