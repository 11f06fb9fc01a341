#!/usr/bin/env bash
# Every test, from a fresh machine: environment, style, types, unit tests, engine tests.
# Settings: PYTHON (python3), VENV (.venv); arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
venv=${VENV:-.venv}

"${PYTHON:-python3}" examples/setup_cpu.py --venv "$venv" --extras cpu,test,gfx950
"$venv/bin/ruff" check .
"$venv/bin/mypy" zyfa_backend kernels/zyfa_kernels
"$venv/bin/python" -m pytest "$@"
