"""compute-sanitizer's memcheck and racecheck over all kernels (`launches`), and the same launches without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "tests.triton.launches")
NVIDIA = torch.cuda.is_available() and not torch.version.hip


def sanitized(tool: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The run of all launches. Without the tool the test fails: skipped, it would pass for done."""
    places = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        pytest.fail(
            f"compute-sanitizer is neither in PATH nor in {places[1]}; it comes with the CUDA toolkit "
            "(conda-forge: cuda-sanitizer-api)"
        )
    command = [found, "--tool", tool, "--error-exitcode", "9", *COMMAND, "cuda"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def tail(run: subprocess.CompletedProcess[str]) -> str:
    return run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not NVIDIA, reason="needs an NVIDIA GPU")
def test_memcheck():
    """Each tensor is an allocation of its own: beyond the end of one within PyTorch's pool nothing would be found."""
    run = sanitized("memcheck", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert run.returncode == 0, tail(run)
    assert "\ndone" in run.stdout, tail(run)


@pytest.mark.gpu
@pytest.mark.skipif(not NVIDIA, reason="needs an NVIDIA GPU")
def test_racecheck():
    """The tool does not know the barriers by which Triton hands work to warps: only there may it report anything."""
    from zyfa_kernels.triton import prefill_hopper

    run = sanitized("racecheck")
    assert "\ndone" in run.stdout, tail(run)
    reported = set(re.findall(r"(\w+\.py):(\d+)", "\n".join(x for x in run.stdout.splitlines() if "access" in x)))
    if not reported:
        assert run.returncode == 0, tail(run)
        return
    source = Path(prefill_hopper.__file__).read_text().splitlines()
    for file, line in reported:
        text = source[int(line) - 1].strip() if file == "prefill_hopper.py" else ""
        assert text in ("def hopper_kernel(", "gl.warp_specialize("), f"{file}:{line}\n{tail(run)}"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the launches run on the GPU itself")
def test_launches_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*COMMAND, "cpu"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith("\ndone\n"), tail(run)
