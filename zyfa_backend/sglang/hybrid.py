"""A decode backend of the engine over a cache that ZYFA's prefill wrote.

K lies rotated in the cache, and K and V lie divided by scales of ZYFA's. Scores stay right if the query is rotated
alike and takes K's scale, and outputs if they take V's; so the backend of the engine is given q, k and v in the
cache's own terms, where its scale is 1, and its output is multiplied. What it would write, ZYFA writes.

Most of these backends round the query that they are given to e4m3 without a scale, which must not make it too small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from zyfa_backend.quantization import e4m3_decode
from zyfa_backend.rotation import rotate

if TYPE_CHECKING:
    from zyfa_backend.scales import LayerScales
    from zyfa_backend.sglang.backend import Served, ZyfaAttnBackend

_RAISED = ", K's raised for the engine's decode"

_WRAPPED = ("forward_decode", "forward_extend")
# K's codes then still reach 448 / 2^7 = 3.5, eight octaves above the least normal number of e4m3.
MOST_OCTAVES = 7


def raise_scales(scales: LayerScales) -> None:
    """Multiply a layer's scales of K, which are known, by the power of two that brings their geometric mean to 1.

    By 2^7 at most, and never below 1. The query takes K's scale, and times a small one it would fall among e4m3's
    subnormal numbers; K's codes are the same but for their exponents.
    """
    octaves = int((-scales.k.log2().mean()).round().clamp(0, MOST_OCTAVES))
    if octaves and not scales.source.endswith(_RAISED):
        scales.fix(scales.k * 2.0**octaves, scales.v, scales.source + _RAISED)


def adapt(decode: Any, ours: ZyfaAttnBackend) -> None:
    """Wrap the methods of `decode`, an AttentionBackend, that read or write the cache; once per backend."""
    if getattr(decode, "_zyfa", None) is ours:
        return
    decode._zyfa = ours
    for name in _WRAPPED:
        setattr(decode, name, _in_the_caches_terms(getattr(decode, name), ours))
    # The engine would have K and V written, unrotated, by the kernel that applies RoPE.
    decode.get_fused_kv_write_buffers = lambda *_: None


def _in_the_caches_terms(original: Callable, ours: ZyfaAttnBackend) -> Callable:
    @functools.wraps(original)
    def forward(q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        served = ours.served(layer)
        _take_scales(layer)
        if k is not None and v is not None:
            k, v = _written(ours, served, layer, forward_batch, k, v, save_kv_cache)
        turned = turned_query(q, layer, served, ours.config.rotation)
        out = original(turned, k, v, layer, forward_batch, save_kv_cache=False, **kwargs)
        return scaled_output(out, layer, served)

    return forward


def _take_scales(layer: Any) -> None:
    """ZYFA has taken the checkpoint's scales: to the engine's backend they are 1."""
    if layer.k_scale is not None or layer.k_scale_float is not None:
        layer.k_scale = layer.v_scale = layer.k_scale_float = layer.v_scale_float = None


def _written(
    ours: ZyfaAttnBackend, served: Served, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes K and V as ZYFA does and returns what was written, in the cache's terms and k's dtype and shape."""
    save = save or ours.written_by_the_engine(forward_batch)
    if save and ours.path.stores_at_once and forward_batch.forward_mode.is_decode():
        # A decode on a GPU reads them from the pool.
        ours.path.store(layer, served, forward_batch, k, v)
        return k, v
    codes = ours.path.encode(layer, served, forward_batch, k, v)
    if save:
        ours.path.write(layer, served, forward_batch, *codes)
    if not ours.config.quantized:
        return codes[0].view(k.shape), codes[1].view(v.shape)
    # bf16 and fp16 hold e4m3 exactly.
    return e4m3_decode(codes[0], k.dtype).view(k.shape), e4m3_decode(codes[1], v.dtype).view(v.shape)


def turned_query(q: torch.Tensor, layer: Any, served: Served, rotation: str) -> torch.Tensor:
    """q [T, Hq · D] or [T, Hq, D] rotated and times K's scale of its head; a new tensor of q's dtype and shape."""
    heads = rotate(q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), rotation)
    return (heads * _per_query_head(served.scales.k, layer)).to(q.dtype).view(q.shape)


def scaled_output(out: torch.Tensor, layer: Any, served: Served) -> torch.Tensor:
    """The engine's output [T, Hq · Dv], which is in the cache's terms, times V's scale of its head."""
    heads = out.reshape(-1, layer.tp_q_head_num, layer.v_head_dim) * _per_query_head(served.scales.v, layer)
    return heads.to(out.dtype).view(out.shape)


def _per_query_head(scale: torch.Tensor, layer: Any) -> torch.Tensor:
    """scale [Hkv] as [Hq, 1]."""
    return scale.repeat_interleave(layer.tp_q_head_num // layer.tp_k_head_num).unsqueeze(-1)
