"""Write and decode on a CPU over an engine's cache that keeps K and V of a head side by side.

The numerics are those of `quantization` and `reference_decode`, which take tensors of any layout and device; this form
touches each byte once, in compiled loops, and takes a fraction of the time.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from zyfa_backend import rotation
from zyfa_backend.config import AttentionConfig
from zyfa_backend.cpu import loops
from zyfa_backend.reference_tiles import LOG2E, per_q_head

_ALIGN = 128  # a multiple of every tile: reading from one on keeps a sequence's blocks aligned
_RULES = {"lean": loops.LEAN, "exact": loops.EXACT, "none": loops.UNROUNDED}
_FORMATS = {"fp8_e4m3": loops.E4M3, "int8": loops.INT8}
_STORED = {
    torch.uint8: (loops.E4M3, torch.uint8),
    torch.bfloat16: (loops.BF16, torch.uint16),
    torch.float16: (loops.FP16, torch.uint16),
    torch.float32: (loops.FP32, torch.uint32),
}


@functools.cache
def compile_for(dtype: torch.dtype, config: AttentionConfig) -> None:
    """Compiles the loops for a cache of `dtype`, or reads them from disk, so that no request has to wait for it."""
    cache, one = torch.zeros(1, 1, 16, 128, dtype=dtype), torch.ones(1, dtype=torch.float32)
    x = torch.zeros(1, 1, 64, dtype=torch.float32)
    if config.quantized:
        write(x, x, cache, torch.zeros(1, dtype=torch.long), k_scale=one, v_scale=one, config=config)
    table = torch.zeros(1, 1, dtype=torch.int32)
    m = torch.zeros(1, dtype=torch.float32)
    weights(torch.zeros(1, 64, dtype=torch.float32), m, config, m)
    decode(
        x, cache, table, [1], k_scale=one, v_scale=one, softmax_scale=1.0, window=None, config=config, finite=True
    )


def weights(
    x: torch.Tensor, m: torch.Tensor, config: AttentionConfig, scratch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_tiles.weights` in one pass over the scores; scratch is not used."""
    _share_threads()
    total, m_after = torch.empty_like(m), m.clone()
    loops.weights(
        x.view(-1, x.shape[-1]).numpy(), m_after.view(-1).numpy(), _RULES[config.probabilities],
        np.float32(config.offset), np.float32(config.delta), config.tile, total.view(-1).numpy(),
    )
    return total, m_after


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    config: AttentionConfig,
) -> tuple[int, int, int]:
    """Rotate K, quantise both and write them to their slots.

    key, value: [T, Hkv, D] in the model's dtype, after RoPE, not rotated. kv_cache: as in `decode`, uint8.
    slots: int64 [T], block · block_size + position; -1 for a token that is not written.
    k_scale, v_scale: fp32 [Hkv]. config: quantises K and V.
    Returns (tokens written, values that the range of their format cut off, values that were not finite). Raises
    ValueError for a slot outside the cache.
    """
    written, cut, odd = loops.write(
        *_memory(kv_cache, config), slots.numpy(), key.to(torch.float32, copy=True).numpy(), value.float().numpy(),
        k_scale.numpy(), v_scale.numpy(), rotation.tables(key.shape[-1], config.rotation),
    )
    if written < 0:
        blocks, _, size, _ = kv_cache.shape
        raise ValueError(f"slot_mapping goes up to {int(slots.max())}; the cache has {blocks} blocks of {size} tokens")
    return written, cut, odd


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: list[int],
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    window: int | None,
    config: AttentionConfig,
    finite: bool,
) -> torch.Tensor:
    """Attention of the last token of each sequence.

    q: [B, Hq, D] in the model's dtype, after RoPE, not rotated.
    kv_cache: [num_blocks, Hkv, block_size, 2·D], K before V, bytes of config's formats or the model's dtype; any
    strides but the last.
    block_table: int32 [B, n] block numbers; seq_lens: keys of each sequence, at least 1.
    k_scale, v_scale: fp32 [Hkv]. window: as in `reference.attend`. finite: no NaN and no infinity was ever written to
    this cache, which saves looking for them.
    Returns [B, Hq, D] in q's dtype. Raises ValueError for a table that leads out of the cache.
    """
    _share_threads()
    rows, hq, dim = q.shape
    hkv = kv_cache.shape[1]
    line, shape, stride, v_at, kinds = _memory(kv_cache, config)
    values, factor = q.to(torch.float32, copy=True).numpy(), softmax_scale * LOG2E
    if config.qk_format == "none":
        # Rotated Q has the dtype of the model, as K in the cache.
        values = rotation.rotate(q, config.rotation).to(q.dtype).float().numpy()
        c = np.ones((rows, hq), np.float32)
    else:
        c = np.empty((rows, hq), np.float32)
        loops.quantize_q(values, _FORMATS[config.qk_format], rotation.tables(dim, config.rotation), values, c)
    if config.qk_format == "fp8_e4m3":
        factor *= 256.0**2  # both operands are read as value/256
    c *= (per_q_head(k_scale, hq, hkv) * factor).numpy()
    spans = np.empty((rows, 3), np.int64)
    for row, length in enumerate(seq_lens):
        visible = 0 if window is None else max(0, length - 1 - window)
        spans[row] = visible // _ALIGN * _ALIGN, visible, length
    out = torch.empty(q.shape, dtype=torch.float32)
    if not loops.attend(
        line, shape, stride, v_at, kinds, block_table.numpy(), spans, values, c,
        (v_scale * (256.0 if kinds[1] == loops.E4M3 else 1.0)).numpy(), _RULES[config.probabilities],
        np.float32(config.offset), np.float32(config.delta), config.tile, finite, out.numpy(),
    ):
        raise ValueError(
            f"block_table {block_table.tolist()} leaves a cache of {shape[0]} blocks of {shape[2]} tokens, "
            f"or has too few blocks for sequences of {seq_lens} tokens"
        )
    return out.to(q.dtype)


def _share_threads() -> None:
    """Loops use as many threads as torch does; numba keeps their number per calling thread."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def _memory(cache: torch.Tensor, config: AttentionConfig) -> tuple[np.ndarray, Any, Any, int, tuple[int, int]]:
    """The memory that `cache` spans as one line of elements, and the cache arguments of the loops.

    Raises ValueError unless a token's channels lie side by side.
    """
    if cache.stride(-1) != 1:
        raise ValueError(f"kv_cache has strides {cache.stride()}; the last one is 1")
    kind, bits = _STORED[cache.dtype]
    last = sum((n - 1) * stride for n, stride in zip(cache.shape, cache.stride(), strict=True))
    line = cache.view(bits).as_strided((last + 1,), (1,)).numpy()
    kinds = (loops.INT8 if config.qk_format == "int8" else kind, kind)
    return line, tuple(cache.shape[:3]), cache.stride()[:3], cache.shape[3] // 2, kinds
