"""A second engine in one process, beside numba.

vLLM 0.32 looks for Triton kernels among the attributes of every loaded module when a CPU worker starts, and takes
llvmlite's library object, which answers any attribute, for one that holds a kernel: it ends with AttributeError.
"""

from __future__ import annotations

import functools
import sys

_MODULE = "llvmlite.binding.ffi"


@functools.cache
def hide_llvmlite() -> None:
    """Leave llvmlite's module out of that search."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # other versions have no such search
        return
    original = getattr(dispatcher, "_rebind_kernels", None)
    if original is None:
        return

    @functools.wraps(original)
    def rebind(*args, **kwargs):
        held = sys.modules.pop(_MODULE, None)
        try:
            return original(*args, **kwargs)
        finally:
            if held is not None:
                sys.modules[_MODULE] = held

    dispatcher._rebind_kernels = rebind
