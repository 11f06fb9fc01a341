"""Every prefill kernel compiles, without a GPU, for gfx950, gfx942, sm_90 and sm_80, and to the instructions it should.

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

CASE = dict(dim=128, block=16, int8=False, lean=True, window=False, fp8_out=False)
CASES = (
    CASE,
    {**CASE, "dim": 192, "block": 0, "lean": False},
    {**CASE, "dim": 64, "block": 64, "int8": True, "window": True, "fp8_out": True},
)
# Packed int8 keys, whose loads are pipelined through shared memory, take the most of it.
AMD_CASES = (*CASES, *({**CASE, "dim": dim, "block": 0, "int8": True} for dim in (64, 128, 192)))
SHARED = {"gfx950": 160, "gfx942": 64}  # KiB that a program may have


def compiled(target: str, kernels: tuple[str, ...], cases: tuple[dict, ...] = CASES) -> dict[str, list[dict]]:
    """Facts of each kernel for each case."""
    script = Path(__file__).with_name("compile_prefill.py")
    jobs = [(kernel, target, case) for kernel in kernels for case in cases]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, str(script), json.dumps(jobs)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {kernel: lines[i * len(cases) : (i + 1) * len(cases)] for i, kernel in enumerate(kernels)}


def count(facts: dict, name: str) -> int:
    return sum(n for operation, n in facts["operations"].items() if operation.startswith(name))


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_amd(target):
    """gfx942 multiplies other FP8 codes than the cache's: there the products are of fp16. Nothing is spilled."""
    kernels = compiled(target, ("plain", "transpose"), AMD_CASES)
    for facts in kernels["plain"]:
        fp8 = any("fp8_fp8" in name or "f8f6f4" in name for name in facts["operations"])
        assert count(facts, "v_mfma") > 0 and fp8 == (target == "gfx950")
    for facts in kernels["plain"] + kernels["transpose"]:
        assert facts["shared"] <= SHARED[target] * 1024 and facts["scratch"] == 0


@pytest.mark.slow
def test_hopper():
    """Products by wgmma, lean codes by F2IP (half an instruction a code), nothing moved across lanes but maxima."""
    kernels = compiled("sm_90", ("hopper", "plain", "transpose"))
    for case, facts in zip(CASES, kernels["hopper"], strict=True):
        assert count(facts, "QGMMA") + count(facts, "IGMMA") >= 32
        assert count(facts, "UTMALDG") > 0
        if case["lean"]:
            # 64 codes a thread and tile, two copies of the loop body, two consumers.
            assert count(facts, "F2IP") == 2 * 2 * 32
            assert count(facts, "MUFU.EX2") < 30
        assert count(facts, "SHFL") < 60 and facts["shared"] <= 227 * 1024
    for facts in kernels["plain"]:
        assert count(facts, "QGMMA") > 0


@pytest.mark.slow
def test_ampere():
    for facts in compiled("sm_80", ("plain",), CASES[:1])["plain"]:
        assert count(facts, "HMMA") > 0 and count(facts, "QGMMA") == 0
