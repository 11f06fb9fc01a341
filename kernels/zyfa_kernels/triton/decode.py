"""Decode over a paged cache with the numerics of `prefill`, for every GPU that Triton supports."""

from __future__ import annotations

from typing import Any

import torch

from zyfa_kernels.triton import prefill_checks as checks
from zyfa_kernels.triton.decode_call import DecodeCall
from zyfa_kernels.triton.launcher import keep, prepared_for
from zyfa_kernels.triton.prefill_checks import PrefillError
from zyfa_kernels.triton.targets import target_of

__all__ = ["BLOCK_SIZES", "PrefillError", "decode"]

BLOCK_SIZES = (1, 16, 32, 64, 128, 256)
MOST_PREPARED = 4096
_prepared: dict[tuple[Any, ...], DecodeCall] = {}  # by all that a call is but for the data and the lengths


def decode(
    q_codes: torch.Tensor,
    q_scale: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    seqlens_k: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    window: int | None = None,
    p: str = "lean",
    qk_format: str = "fp8_e4m3",
    offset: float = 8.0,
    delta: float = -0.45,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last token of each sequence over all its keys, itself included.

    q_codes: [B, Hq, D], q_scale: fp32 [B, Hq], as `rotate_quantize_q` returns them: e4m3 (uint8 or float8_e4m3fn) or
    int8. k_cache, v_cache: [num_blocks, block_size, Hkv, D or Dv], block_size 1, 16, 32, 64, 128 or 256, any strides
    that are multiples of 16 with the channels adjacent; K rotated and in qk_format, V in e4m3.
    (D, Dv): (64, 64), (128, 128) or (192, 128); Hq a multiple of Hkv. k_scale, v_scale: fp32 [Hkv] or [1].
    seqlens_k: int32 [B], keys of each sequence, 0 for a row that is none; block_table: int32 [B, n].
    max_seqlen_k: 0 or more; at least the longest of the batch, which nothing can check without waiting: keys beyond are
    not seen.
    window: the query, at position p, sees no key before p - window; None is unlimited.
    p, offset, delta: as in `prefill`, whose codes of P a token gets here, too: its result in prefill differs by the
    order in which fp32 adds up, and on Hopper by the short accumulator of its FP8 products.
    out: [B, Hq, Dv] bf16 or fp16 to write, a new one of out_dtype if None.

    Returns (out, lse fp32 [Hq, B], natural log). A row without a key gives 0 and -inf; a live key whose K is not finite
    makes the row NaN, one whose V is not finite the channels concerned; no other row is touched. A row's bits depend
    on its own keys alone, neither on the batch nor on max_seqlen_k; beyond 8,192 keys also on an Hkv below 8, by which
    the number of splits goes and with it the order of sums. Nothing waits for the device, and what is launched
    depends on shapes and max_seqlen_k alone: a captured graph serves all lengths up to it. The first call for a layout
    compiles: not while a graph is captured. Raises PrefillError.
    """
    checks.check_tensors(
        {
            "q_codes": q_codes,
            "q_scale": q_scale,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "seqlens_k": seqlens_k,
            "block_table": block_table,
        },
        {"out": out},
    )
    checks.check_ranks(q_codes, k_cache, v_cache, True)
    if out is None:
        checks.require(
            out_dtype in checks.OUT_DTYPES,
            f"out_dtype={out_dtype} is not accepted; choose one of {', '.join(map(str, checks.OUT_DTYPES))}",
        )
        out = torch.empty(*q_codes.shape[:2], v_cache.shape[-1], dtype=out_dtype, device=q_codes.device)
    lse = torch.empty(q_codes.shape[1], q_codes.shape[0], dtype=torch.float32, device=q_codes.device)
    tensors = (q_codes, q_scale, k_cache, v_cache, k_scale, v_scale, out, lse, block_table, seqlens_k)
    numbers = (softmax_scale, window, p, qk_format, offset, delta)
    facts = (*numbers, *((x.shape, x.stride(), x.dtype, x.device) for x in tensors))
    prepared = prepared_for(facts, _prepared)
    if prepared is None or (q_codes.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        checks.check_scalars(*numbers)
        checks.check_operands(q_codes, k_cache, v_cache, qk_format, True, BLOCK_SIZES)
        checks.check_rows(q_codes, seqlens_k, block_table)
        checks.check_scales(q_codes, q_scale, k_scale, v_scale, k_cache.shape[2])
        checks.check_out(q_codes, v_cache.shape[-1], out, checks.OUT_DTYPES)
        prepared = DecodeCall(target_of(q_codes.device), tensors, numbers)
        keep(facts, prepared, _prepared, MOST_PREPARED)
    checks.check_longest("max_seqlen_k", max_seqlen_k, 0)
    checks.check_room(max_seqlen_k, block_table, k_cache)
    prepared.run(tensors, max_seqlen_k)
    return out, lse
