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
    from zyfa_kernels.triton.head_scales import head_scales
    from zyfa_kernels.triton.prefill import prefill
    from zyfa_kernels.triton.rotate_quantize import rotate_quantize_packed

    numerics: dict[str, Any] = {"rotation": config.rotation, "qk_format": config.qk_format}
    k_scale, v_scale = head_scales(k, v, **numerics)
    q_codes, q_scale, k_codes, v_codes = rotate_quantize_packed(q, k, v, k_scale, v_scale, **numerics)
    out, lse = prefill(
        q_codes, q_scale, k_codes, v_codes, k_scale, v_scale,
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

