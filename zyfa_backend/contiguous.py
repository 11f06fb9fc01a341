"""Prefill on a GPU from K and V that are in no cache, as MLA's is: quantised for the call, all requests at once."""

from __future__ import annotations

from typing import Any

import torch

from zyfa_backend.config import AttentionConfig


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    longest: tuple[int, int],
    softmax_scale: float,
    causal: bool,
    config: AttentionConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, Dv] in q's dtype, lse fp32 [H, T], natural), by Triton's kernels.

    q: [T, H, D], k: [Tk, H, D], v: [Tk, H, Dv], bf16 or fp16, after RoPE. cu_seqlens_q, cu_seqlens_k: int32 [B + 1].
    longest: the most queries and keys of a request. K and V are scaled per head by the largest value of the call,
    without those that are not finite; e4m3 by a power of two, so that a request's codes are the same beside others,
    but for values below 2^-13 of the call's largest.
    """
    from zyfa_kernels.triton.prefill import prefill
    from zyfa_kernels.triton.rotate_quantize import rotate_quantize_q, rotate_quantize_write

    numerics: dict[str, Any] = {"rotation": config.rotation, "qk_format": config.qk_format}
    codes, q_scale = rotate_quantize_q(q, **numerics)
    keys, heads, dim = k.shape
    # A row's own scale is its largest rotated value over the format's; a row with a NaN has a NaN and does not count,
    # nor does a row of zeros, whose scale is 1.
    rows, row_scale = rotate_quantize_q(k, **numerics)
    k_scale = torch.where((rows.view(torch.uint8) == 0).all(-1), 0.0, torch.nan_to_num(row_scale)).amax(0)
    k_scale = torch.where(k_scale > 0, k_scale, 1.0)
    if config.qk_format == "fp8_e4m3":
        k_scale = _power_of_two(k_scale)
    largest = torch.nan_to_num(v.abs().amax(-1).float(), posinf=0.0).amax(0)
    v_scale = _power_of_two(torch.where(largest > 0, largest / 448, 1.0))
    k_codes = torch.empty(1, keys, heads, dim, dtype=torch.uint8, device=k.device)
    v_codes = torch.empty(1, keys, heads, v.shape[2], dtype=torch.uint8, device=k.device)
    slots = torch.arange(keys, device=k.device)
    rotate_quantize_write(k, v, k_codes, v_codes, slots, k_scale, v_scale, **numerics)
    out, lse = prefill(
        codes, q_scale, k_codes[0], v_codes[0], k_scale, v_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        softmax_scale=softmax_scale,
        causal=causal,
        p=config.probabilities,
        qk_format=config.qk_format,
        offset=config.offset,
        delta=config.delta,
        out=torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device),
        lse=True,
    )  # fmt: skip
    assert lse is not None
    return out, lse


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two from 2^-126 on that is not less than each positive fp32 scale."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(min=-126))
