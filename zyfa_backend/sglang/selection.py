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


def create(runner: Any) -> Any:
    """The attention backend that serves `runner`, a ModelRunner whose model and KV pool exist.

    Raises Unsupported with everything that stands against ZYFA; with ZYFA_FALLBACK=1 returns the engine's backend
    instead, with a warning.
    """
    wrap_hybrid()
    mla = bool(runner.use_mla_backend)
    reasons = [*runner_reasons(runner), *pool_reasons(runner.token_to_kv_pool, mla)]
    if not reasons:
        try:
            return _build(runner, mla)
        except Unsupported as error:
            reasons = [str(error)]
    text = f"ZYFA does not serve this model: {'; '.join(reasons)}."
    if mla or not settings.load().fallback:
        raise Unsupported(f"{text} {'Choose another attention backend' if mla else _FALLBACK_HINT}")
    return _engine_backend(runner, text)


def _build(runner: Any, mla: bool) -> Any:
    if mla:
        from zyfa_backend.sglang.mla import ZyfaMLABackend

        return ZyfaMLABackend(runner)
    from zyfa_backend.sglang.backend import ZyfaAttnBackend

    return ZyfaAttnBackend(runner)


def _engine_backend(runner: Any, why: str) -> Any:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    name = "torch_native" if str(runner.device).startswith("cpu") else "triton"
    logger.warning("%s ZYFA_FALLBACK: the engine's %s serves it", why, name)
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
