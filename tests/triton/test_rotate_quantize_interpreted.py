"""Runs test_rotate_quantize.py under Triton's interpreter where there is no GPU.

In a process of its own: the interpreter has to be chosen before triton is imported, and an engine that another test
starts must not inherit the choice.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
def test_under_the_interpreter():
    file = Path(__file__).with_name("test_rotate_quantize.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "no tests ran" not in done.stdout
