"""FP8 prefill attention over a paged cache, for every GPU that Triton supports."""

from __future__ import annotations

from typing import Any

import torch

from zyfa_kernels.triton import prefill_checks as checks
from zyfa_kernels.triton.launcher import keep, prepared_for
from zyfa_kernels.triton.prefill_call import Call
from zyfa_kernels.triton.prefill_checks import PrefillError
from zyfa_kernels.triton.targets import target_of
from zyfa_kernels.triton.transpose import TILE

__all__ = ["PrefillError", "implementation", "prefill", "workspace_bytes"]

WORKSPACE_BYTES = 1 << 29  # of V key-major at a time; longer batches are taken in parts
MOST_PREPARED = 4096
_prepared: dict[tuple[Any, ...], Call] = {}  # by all that a call is but for the data


def workspace_bytes(sequences: int, max_seqlen_k: int, kv_heads: int, v_dim: int) -> int:
    """The most bytes that a call takes for V key-major, of up to that many sequences of up to that many keys."""
    longest = -(-max_seqlen_k // TILE) * TILE * kv_heads * v_dim
    return max(longest, min(sequences * longest, WORKSPACE_BYTES))


def prefill(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
    window: int | None = None,
    p: str = "lean",
    qk_format: str = "fp8_e4m3",
    offset: float = 8,
    delta: float = -0.45,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    lse: torch.Tensor | bool | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a batch of sequences whose queries are the last of their keys.

    q: [T, Hq, D] codes, rotated and quantised, e4m3 (uint8 or float8_e4m3fn) or int8; q_scale: fp32 [T, Hq].
    k_cache, v_cache: [num_blocks, block_size, Hkv, D or Dv], block_size 16, 32, 64 or 128, any strides that are
    multiples of 16 with the channels adjacent (on Hopper those of blocks and heads multiples of the tokens', or the
    heads within a token, as in every layout of vLLM's); K rotated and in qk_format, V in e4m3. With block_table None
    they are packed, [Tk, Hkv, D or Dv], and cu_seqlens_k int32 [B + 1] says where sequences begin.
    (D, Dv): (64, 64), (128, 128) or (192, 128); Hq a multiple of Hkv.
    k_scale, v_scale: fp32 [Hkv] or [1].
    cu_seqlens_q: int32 [B + 1]; seqlens_k: int32 [B], keys of each sequence, its queries included; block_table: int32
    [B, n]. max_seqlen_q, max_seqlen_k: at least the longest of the batch; not 0 where q has rows, the latter only
    where k_cache has keys. Values on the device, such as longer lengths, are not checked, which would wait for it.
    window: a query at position p sees no key before p - window; None is unlimited. causal: none after p.
    p: "lean" or "exact" probabilities; offset and delta as in the specification. The running maximum and the block
    exponent are renewed every 128 keys; the reference (tile=128) has an exponent per 64, which only an offset under 4
    lets one see.
    out: [T, Hq, Dv] bf16 or fp16, or float8_e4m3fn with out_scale fp32 [1] (codes of the result / out_scale,
    saturated); bf16 if None. lse: fp32 [Hq, T] to write, True for a new one, None for none.

    Returns (out, lse), lse in natural log. Rows that no sequence of cu_seqlens_q covers are not written. A query
    without a live key gives 0 and -inf; a live key whose K is not finite makes the row NaN, one whose V is not finite
    the channels concerned; no other row is touched.
    A row's bits depend on its own keys alone: chunked, cached, batched or alone. Nothing waits for the device.
    Raises PrefillError.
    """
    new_lse = lse is True
    if isinstance(lse, bool):
        lse = None
    checks.check_tensors(
        {
            "q": q,
            "q_scale": q_scale,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "cu_seqlens_q": cu_seqlens_q,
        },
        {
            "seqlens_k": seqlens_k,
            "block_table": block_table,
            "out": out,
            "out_scale": out_scale,
            "lse": lse,
            "cu_seqlens_k": cu_seqlens_k,
        },
    )
    checks.check_ranks(q, k_cache, v_cache, block_table is not None)
    (tokens, hq, _), dv = q.shape, v_cache.shape[-1]
    if new_lse:
        lse = torch.empty(hq, tokens, dtype=torch.float32, device=q.device)
    if out is None:
        out = torch.empty(tokens, hq, dv, dtype=torch.bfloat16, device=q.device)
    lengths_k = cu_seqlens_k if block_table is None else seqlens_k
    tensors = (
        q,
        q_scale,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        out,
        out_scale,
        lse,
        block_table,
        cu_seqlens_q,
        lengths_k,
    )
    numbers = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, p, qk_format, offset, delta)
    facts = (
        WORKSPACE_BYTES,
        *numbers,
        *(x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors),
    )
    prepared = prepared_for(facts, _prepared)
    if prepared is None or (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        checks.check_scalars(softmax_scale, window, p, qk_format, offset, delta)
        checks.check_causal(causal)
        checks.check_longest("max_seqlen_q", max_seqlen_q, 1 if tokens else 0)
        checks.check_longest("max_seqlen_k", max_seqlen_k, 1 if tokens and k_cache.numel() else 0)
        checks.check_operands(q, k_cache, v_cache, qk_format, block_table is not None)
        checks.check_lengths(cu_seqlens_q, seqlens_k, cu_seqlens_k, block_table, q.device)
        checks.check_scales(q, q_scale, k_scale, v_scale, k_cache.shape[-2])
        checks.check_out(q, dv, out, (*checks.OUT_DTYPES, torch.float8_e4m3fn))
        checks.check_out_scale_and_lse(q, out, out_scale, lse)
        checks.check_room(max_seqlen_k, block_table, k_cache)
        prepared = Call(target_of(q.device), tensors, numbers, WORKSPACE_BYTES)
        keep(facts, prepared, _prepared, MOST_PREPARED)
    prepared.run(tensors)
    return out, lse


def implementation(device: torch.device | str) -> str:
    """Which kernel `prefill` launches on a device and why, one line."""
    target = target_of(torch.device(device))
    return f"{target.kernel}: {target.reason}"
