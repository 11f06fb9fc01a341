"""FP8 prefill attention over a paged cache, for every GPU that Triton supports."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from zyfa_kernels.triton import prefill_checks as checks
from zyfa_kernels.triton.launcher import launch_cached
from zyfa_kernels.triton.prefill_checks import PrefillError
from zyfa_kernels.triton.prefill_kernel import prefill_kernel
from zyfa_kernels.triton.targets import Target, target_of
from zyfa_kernels.triton.transpose import TILE, transpose_kernel

__all__ = ["PrefillError", "implementation", "prefill"]

WORKSPACE_BYTES = 1 << 29  # of V key-major at a time; longer batches are taken in parts
LOG2E = 1 / math.log(2)
MOST_ACCEPTED = 4096
_accepted: set[tuple[Any, ...]] = set()  # shapes, strides and dtypes of calls that passed the checks


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
    multiples of 16 with the channels adjacent; K rotated and in qk_format, V in e4m3. With block_table None they are
    packed, [Tk, Hkv, D or Dv], and cu_seqlens_k int32 [B + 1] says where sequences begin.
    (D, Dv): (64, 64), (128, 128) or (192, 128); Hq a multiple of Hkv.
    k_scale, v_scale: fp32 [Hkv] or [1].
    cu_seqlens_q: int32 [B + 1]; seqlens_k: int32 [B], keys of each sequence, its queries included; block_table: int32
    [B, n]. max_seqlen_q, max_seqlen_k: at least the longest of the batch; rows beyond them are not computed.
    window: a query at position p sees no key before p - window; None is unlimited. causal: none after p.
    p: "lean" or "exact" probabilities; offset and delta as in the specification.
    out: [T, Hq, Dv] bf16 or fp16, or float8_e4m3fn with out_scale fp32 [1] (codes of the result / out_scale,
    saturated); bf16 if None. lse: fp32 [Hq, T] to write, True for a new one, None for none.

    Returns (out, lse), lse in natural log. A query without a live key gives 0 and -inf; a live key whose K is not
    finite makes the row NaN, one whose V is not finite the channels concerned; no other row is touched.
    A row's bits depend on its own keys alone: chunked, cached, batched or alone. Nothing waits for the device.
    Raises PrefillError.
    """
    paged = block_table is not None
    (tokens, hq, d), dv = q.shape, v_cache.shape[-1]
    if lse is True:
        lse = torch.empty(hq, tokens, dtype=torch.float32, device=q.device)
    elif lse is False:
        lse = None
    if out is None:
        out = torch.empty(tokens, hq, dv, dtype=torch.bfloat16, device=q.device)
    given = (q, q_scale, k_cache, v_cache, k_scale, v_scale, cu_seqlens_q, seqlens_k, cu_seqlens_k, block_table)
    given += (out, out_scale, lse)
    facts = (softmax_scale, window, p, qk_format, offset, delta, max_seqlen_k) + tuple(
        x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given
    )
    aligned = (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % 16 == 0
    if facts not in _accepted or not aligned:
        checks.check_scalars(softmax_scale, window, p, qk_format, offset, delta)
        checks.check_operands(q, k_cache, v_cache, qk_format, paged)
        checks.check_lengths(cu_seqlens_q, seqlens_k, cu_seqlens_k, block_table, q.device)
        checks.check_scales(q, q_scale, k_scale, v_scale, k_cache.shape[-2])
        checks.check_outputs(q, dv, out, out_scale, lse)
        checks.check_room(max_seqlen_k, block_table, k_cache)
        if len(_accepted) >= MOST_ACCEPTED:
            _accepted.clear()
        _accepted.add(facts)
    batch = cu_seqlens_q.shape[0] - 1
    if tokens == 0 or batch == 0 or max_seqlen_q == 0:
        return out, lse
    target = target_of(q.device)
    call = _Call(
        target=target,
        q=q,
        q_scale=q_scale,
        k=k_cache,
        v=v_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        cu_seqlens_q=cu_seqlens_q,
        lengths_k=seqlens_k if paged else cu_seqlens_k,
        block_table=block_table,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max(max_seqlen_k, 1),
        softmax_scale_log2=softmax_scale * LOG2E,
        causal=causal,
        window=window,
        lean=p == "lean",
        int8=qk_format == "int8",
        offset=float(offset),
        delta=float(delta),
        out=out,
        out_scale=out_scale,
        lse=lse,
    )
    call.run(batch)
    return out, lse


def implementation(device: torch.device | str) -> str:
    """Which kernel `prefill` launches on a device and why, one line."""
    target = target_of(torch.device(device))
    return f"{target.kernel}: {target.reason}"


class _Call:
    """One call of `prefill`, checked; `run` launches it."""

    def __init__(self, *, target: Target, **arguments: Any) -> None:
        self.target = target
        self.__dict__.update(arguments)

    def run(self, batch: int) -> None:
        tiles = triton.cdiv(self.max_seqlen_k, TILE)
        heads, dv = self.v.shape[-2:]
        per_sequence = tiles * heads * dv * TILE
        step = min(batch, max(1, WORKSPACE_BYTES // per_sequence))
        vt = torch.empty(step * per_sequence, dtype=torch.uint8, device=self.q.device)
        bad = torch.empty(step * tiles * heads, dtype=torch.int32, device=self.q.device)
        for first in range(0, batch, step):
            sequences = min(step, batch - first)
            self._transpose(vt, bad, first, sequences, tiles)
            if self.target.kernel == "hopper":
                from zyfa_kernels.triton.hopper_launch import launch

                launch(self, vt, bad, first, sequences, tiles)
            else:
                self._attend(vt, bad, first, sequences, tiles)

    def strides(self, x: torch.Tensor, divisor: int = 1) -> tuple[int, int, int]:
        """(block, token, head) strides of a cache, 0 for the block where it is packed."""
        block = x.stride(0) if self.block_size else 0
        return block // divisor, x.stride(-3) // divisor, x.stride(-2) // divisor

    @property
    def block_size(self) -> int:
        return self.k.shape[1] if self.block_table is not None else 0

    @property
    def table_stride(self) -> int:
        return self.block_table.stride(0) if self.block_table is not None else 0

    def _transpose(self, vt: torch.Tensor, bad: torch.Tensor, first: int, sequences: int, tiles: int) -> None:
        heads, dv = self.v.shape[-2:]
        arguments = (
            self.k,
            self.v,
            vt,
            bad,
            self.block_table if self.block_table is not None else self.lengths_k,
            self.cu_seqlens_q,
            self.lengths_k,
            first,
            self.table_stride,
            self.window or 0,
        )
        constants = (
            *self.strides(self.k, 4),
            *self.strides(self.v, 4),
            self.q.shape[2],
            dv,
            self.block_size,
            self.window is not None,
            self.target.kernel == "hopper",
            self.int8,
            TILE,
        )
        typed = {0: torch.int32, 1: torch.int32, 2: torch.int32}
        key = (self.q.device.index,)
        launch_cached(transpose_kernel, (tiles, heads, sequences), arguments, constants, typed, key, num_warps=4)

    def _attend(self, vt: torch.Tensor, bad: torch.Tensor, first: int, sequences: int, tiles: int) -> None:
        target, q, k = self.target, self.q, self.k
        code = torch.int8 if self.int8 else torch.uint8
        q, k = q.view(code), k.view(code)
        hq, d, dv = q.shape[1], q.shape[2], self.v.shape[-1]
        tile = target.tile(d)
        prefill_kernel[(triton.cdiv(self.max_seqlen_q, tile["tile_m"]), hq, sequences)](
            q,
            self.q_scale,
            k,
            self.v.view(torch.uint8),
            vt,
            bad,
            self.k_scale,
            self.v_scale,
            self.out.view(torch.uint8) if self.out_scale is not None else self.out,
            self.out_scale,
            self.lse,
            self.block_table,
            self.cu_seqlens_q,
            self.lengths_k,
            first,
            self.table_stride,
            q.stride(0),
            q.stride(1),
            self.q_scale.stride(0),
            self.q_scale.stride(1),
            *self.strides(k),
            *self.strides(self.v),
            self.out.stride(0),
            self.out.stride(1),
            self.lse.stride(0) if self.lse is not None else 0,
            int(self.k_scale.numel() > 1),
            int(self.v_scale.numel() > 1),
            hq // k.shape[-2],
            tiles,
            self.softmax_scale_log2,
            self.delta,
            self.window or 0,
            D1=128 if d == 192 else d,
            D2=64 if d == 192 else 0,
            DV=dv,
            BLOCK=self.block_size,
            CAUSAL=self.causal,
            WINDOW=self.window is not None,
            LEAN=self.lean,
            INT8=self.int8,
            HALF=target.half,
            NATIVE=target.native,
            PTX=target.ptx,
            OFFSET=self.offset,
            LSE=self.lse is not None,
            FP8_OUT=self.out_scale is not None,
            TILE_M=tile["tile_m"],
            TILE=TILE,
            num_warps=tile["num_warps"],
            num_stages=tile["num_stages"],
        )
