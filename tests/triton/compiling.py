"""Compiles kernels for GPUs that need not be there, in a process without Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compile_for(
    target: str, kernel: Any, constants: dict[str, Any], types: dict[str, str], aligned: bool = False, **options: int
) -> Any:
    """types: of the parameters that are not int32; aligned: whether they are pointers to 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.triton.compile_prefill import TARGETS

    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    places = [i for i, n in enumerate(kernel.arg_names) if n in types] if aligned else []
    attributes = {(i,): [["tt.divisibility", 16]] for i in places}
    source = ASTSource(kernel, signature, constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def run_script(file: str) -> str:
    """What a test's file prints as a script, which compiles."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, file], env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
