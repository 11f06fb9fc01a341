"""Runs GPU tests under Triton's interpreter, in processes of their own: it is chosen on import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests run on the GPU itself")
@pytest.mark.parametrize("name", ["test_decode.py", "test_packed.py", "test_vllm_gpu.py"])
def test_under_the_interpreter(name):
    if name == "test_vllm_gpu.py":
        pytest.importorskip("vllm")
    file = Path(__file__).with_name(name)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
