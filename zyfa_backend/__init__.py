"""ZYFA: FP8 attention with a fused Hadamard rotation, as a backend of vLLM and as an importable function.

    out, lse = zyfa_backend.attention(q, k, v, softmax_scale=128**-0.5)
    zyfa_backend.explain(zyfa_backend.Shape(128, 128), "cpu")
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_LAZY = {
    "attention": "zyfa_backend.reference",
    "explain": "zyfa_backend.dispatch",
    "counters": "zyfa_backend.dispatch",
    "Shape": "zyfa_backend.dispatch",
    "AttentionConfig": "zyfa_backend.config",
    "PRESETS": "zyfa_backend.config",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    # Engines import this package in every process; torch comes in only with what needs it.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'zyfa_backend' has no attribute {name!r}")
