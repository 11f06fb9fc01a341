"""Builds the backend of a ModelRunner: ZYFA's for K and V of every head, ZYFA's for MLA's prefill, or a refusal."""

from __future__ import annotations

import functools
import logging
from typing import Any

from zyfa_backend import settings
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.sglang import NAME
from zyfa_backend.sglang.checks import pool_reasons, runner_reasons

_FALLBACK_HINT = "ZYFA_FALLBACK=1 leaves the model to the engine's own backend"

logger = logging.getLogger("sglang.zyfa")


def create(runner: Any, kernels: str | None = None) -> Any:
    """The attention backend that serves `runner`, a ModelRunner whose model and KV pool exist.

    kernels: "torch" or "triton" instead of those that are meant for the runner's device. On a GPU, where ZYFA has no
    kernel for a cache that is not quantised, the engine's backend serves such a cache, with a warning. Raises
    Unsupported with everything that stands against ZYFA; with ZYFA_FALLBACK=1 returns the engine's backend instead,
    with a warning.
    """
    wrap_hybrid()
    mla = bool(runner.use_mla_backend)
    reasons = [*runner_reasons(runner), *pool_reasons(runner.token_to_kv_pool, mla)]
    on_gpu = (kernels or ("torch" if str(runner.device).startswith("cpu") else "triton")) == "triton"
    if not reasons and on_gpu and not mla and _unquantised(runner):
        return _engine_backend(
            runner,
            "ZYFA has no kernel on a GPU for a cache that is not quantised (--kv-cache-dtype fp8_e4m3 makes one that "
            "is):",
        )
    if not reasons:
        try:
            return _build(runner, mla, kernels)
        except Unsupported as error:
            reasons = [str(error)]
    text = f"ZYFA does not serve this model: {'; '.join(reasons)}."
    if mla or not settings.load().fallback:
        raise Unsupported(f"{text} {'Choose another attention backend' if mla else _FALLBACK_HINT}")
    return _engine_backend(runner, f"{text} ZYFA_FALLBACK:")


def _build(runner: Any, mla: bool, kernels: str | None) -> Any:
    if mla:
        from zyfa_backend.sglang.mla import ZyfaMLABackend

        return ZyfaMLABackend(runner, kernels)
    from zyfa_backend.sglang.backend import ZyfaAttnBackend

    return ZyfaAttnBackend(runner, kernels)


def _unquantised(runner: Any) -> bool:
    """Whether the pool holds K and V of the model's dtype, as they are: then another backend loses nothing."""
    from zyfa_backend.sglang.checks import ACCEPTED_CACHES

    chosen = settings.load().config
    plain = chosen is None or (not chosen.quantized and chosen.rotation == "none")
    return ACCEPTED_CACHES.get(runner.kv_cache_dtype) != "fp8_e4m3" and plain


def _engine_backend(runner: Any, why: str) -> Any:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    name = "torch_native" if str(runner.device).startswith("cpu") else "triton"
    logger.warning("%s the engine's %s serves it", why, name)
    return ATTENTION_BACKENDS[name](runner)


def decode_name(runner: Any) -> str:
    """The backend that decodes for `runner`: zyfa, or the name of the engine's."""
    return str(getattr(runner, "decode_attention_backend_str", None) or NAME)


def prefill_name(runner: Any) -> str:
    """The backend that prefills for `runner`: zyfa, or the name of the engine's."""
    return str(getattr(runner, "prefill_attention_backend_str", None) or NAME)


@functools.cache
def wrap_hybrid() -> None:
    """Where SGLang pairs ZYFA's prefill with another decode, make that decode read and write what ZYFA's cache holds.

    SGLang builds the two apart from each other, so the pair is known when it is put together.
    """
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    original = HybridAttnBackend.__init__

    @functools.wraps(original)
    def init(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from zyfa_backend.sglang.backend import ZyfaAttnBackend

        if isinstance(self.prefill_backend, ZyfaAttnBackend):
            self.prefill_backend.share_cache_with(self.decode_backend)

    HybridAttnBackend.__init__ = init
