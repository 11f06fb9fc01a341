"""Every decode kernel compiles, without a GPU, for gfx950, gfx942 and sm_90, and to the products it should.

The compilations for a target are a process of their own: another test's process may have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASE = dict(dim=128, block=16, int8=True, lean=True, window=False, group=4, tile_m=16)
CASES = (
    CASE,
    {**CASE, "int8": False, "group": 7},
    {**CASE, "dim": 192, "block": 1, "int8": False, "lean": False, "window": True},
    {**CASE, "dim": 64, "block": 256, "group": 128, "tile_m": 64},
)
SHARED = {"sm_90": 227, "gfx950": 160, "gfx942": 64}  # KiB that a program may have


def compiled(target: str) -> dict[str, list[dict]]:
    """Facts of each kernel for each case."""
    root = Path(__file__).resolve().parents[2]
    jobs = [(kernel, target, case) for kernel in ("maxima", "attend") for case in CASES]
    jobs.append(("combine", target, CASE))
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_decode.py")), json.dumps(jobs)],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {"maxima": lines[: len(CASES)], "attend": lines[len(CASES) : -1], "combine": lines[-1:]}


def count(facts: dict, *parts: str) -> int:
    return sum(n for operation, n in facts["operations"].items() if any(part in operation for part in parts))


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_compiles(target):
    """Scores of int8 are integer products, all else products of fp16; lean codes are packed by F2IP on CUDA."""
    kernels = compiled(target)
    assert count(kernels["combine"][0], "EX2", "v_exp") > 0
    for case, maxima, attend in zip(CASES, kernels["maxima"], kernels["attend"], strict=True):
        scores = ("IGMMA", "IMMA", "v_mfma_i32") if case["int8"] else ("HGMMA", "HMMA.", "v_mfma_f32")
        assert count(maxima, *scores) > 0 and count(attend, *scores) > 0
        assert count(attend, "HGMMA", "HMMA.", "v_mfma_f32") > 0
        assert attend["shared"] <= SHARED[target] * 1024
        if target == "sm_90" and case["lean"]:
            assert count(attend, "F2IP") > 0
        if case["group"] <= 16:  # warps share the work instead of repeating it, and nothing is spilled
            assert count(attend, "STL", "scratch") == 0
            assert count(maxima, *scores) <= 48
