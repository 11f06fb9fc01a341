"""Keeps SGLang 0.5.18 from launching Triton kernels on a CPU.

It fills its pools' indices with a Triton kernel beside any backend but two that it names. Later versions ask the
platform first.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

from zyfa_backend.sglang import NAME

_ASKING = ("sglang.srt.mem_cache.allocation", "sglang.srt.model_executor.forward_batch_info")


def allow() -> None:
    """Answer for ZYFA in the modules that ask, once, in processes that serve on a CPU."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    for name in _ASKING:
        module: Any = importlib.import_module(name)
        if module.support_triton(NAME):
            module.support_triton = _without_zyfa(module.support_triton)


def _without_zyfa(original: Callable[[str], bool]) -> Callable[[str], bool]:
    @functools.wraps(original)
    def support_triton(backend: str) -> bool:
        return backend != NAME and original(backend)

    return support_triton
