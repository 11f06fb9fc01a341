"""What vLLM's worker does before it serves: its profiling, warm-up and graph capture run on made-up tokens.

Some of those steps write to real slots of the cache, so their slots do not tell them from requests.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STEPS = ("determine_available_memory", "compile_or_warm_up_model")
SOURCES = "ZYFA_VLLM_SOURCES"
_running = 0


def rehearsing() -> bool:
    """Whether tokens that reach the layers now are made up."""
    return _running > 0


@functools.cache
def watch() -> None:
    """Note from now on when the worker of this process rehearses; called while its model is loaded."""
    from vllm.v1.worker.gpu_worker import Worker

    for name in _STEPS:
        setattr(Worker, name, _noted(getattr(Worker, name)))


@functools.cache
def key_compiled_graphs() -> None:
    """Have vLLM key its compile cache by these sources: compiled graphs hold what they have the engine call."""
    import vllm.envs

    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    vllm.envs.environment_variables[SOURCES] = lambda: digest


def _noted(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _running
        _running += 1
        try:
            return method(*args, **kwargs)
        finally:
            _running -= 1

    return call
