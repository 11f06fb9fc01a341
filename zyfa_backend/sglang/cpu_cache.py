"""Lets an FP8 cache be had on a CPU.

SGLang 0.5.23 makes one there for its AMX kernels alone, in a form of its own. Where ZYFA serves, on any CPU, the cache
is the plain one of e4m3 bytes that GPUs have. Earlier versions have no such condition.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from zyfa_backend.sglang import NAME

AMX = "intel_amx"


def allow() -> None:
    """Wrap SGLang's cache configurator once, in processes that serve on a CPU."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.mem_cache import kv_cache_configurator as module

    configurator = module.KVCacheConfigurator
    if not hasattr(module, "cpu_has_amx_support") or hasattr(configurator.configure, "__wrapped__"):
        return
    configurator.configure = _wrapped(configurator.configure, module)


def _wrapped(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def configure(self, *args: Any, **kwargs: Any) -> Any:
        with _plain_cache(module) if _is_ours(self, module) else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return configure


def _is_ours(configurator: Any, module: ModuleType) -> bool:
    """Whether ZYFA prefills an FP8 cache on a CPU."""
    import torch

    on_cpu = module.current_platform.is_cpu()
    prefill = module.attention_backends()[0]
    return on_cpu and configurator.kv_cache_dtype == torch.float8_e4m3fn and prefill == NAME


@contextlib.contextmanager
def _plain_cache(module: ModuleType) -> Iterator[None]:
    """While SGLang configures: its condition is met, and the cache is not quantised by the engine itself."""
    configurator = module.KVCacheConfigurator
    changes: list[tuple[Any, str, Any]] = [
        (module, "cpu_has_amx_support", lambda: True),
        (module, "attention_backends", lambda: (AMX, AMX)),
        (configurator, "_build_mha_quant_method", lambda *_, **__: None),
    ]
    kept = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, kept, strict=True):
            setattr(owner, name, value)
