"""Arguments of an attention launch: from pointers, strides and lengths to grid and argument block.

Knows no framework: tensors are addresses with byte strides, so torch, an engine and the emulator pass theirs alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..asm.fp8_hd128.arguments import ARGUMENTS
from ..asm.fp8_hd128.layout import HEAD_DIM, WAVES, WORKGROUP_QUERIES
from ..asm.fp8_hd128.prologue import code_bias
from .registry import kernel

LOG2E = 1 / math.log(2)
DIES = 8  # accelerator dies of an MI355X, over which workgroups are dealt in turn
_LARGEST_OFFSET = 2**31
_NO_WINDOW = 2**30


class LaunchError(ValueError):
    """An argument of a launch is not accepted; the message names it, its value and what would be."""


@dataclass(frozen=True)
class Array:
    """A [tokens, heads, ...] array on the device: address, and byte strides of a token and of a head."""

    address: int
    row: int
    head: int


@dataclass(frozen=True)
class Pages:
    """A paged cache: address and row stride of its int32 [batch, pages] table, tokens a page, bytes between pages."""

    table: int
    table_row: int
    tokens: int
    k_stride: int
    v_stride: int


@dataclass(frozen=True)
class Launch:
    kernel: str
    symbol: str
    grid: tuple[int, int, int]
    block: int
    kernarg: bytes


def _group_magic(q_heads: int, group: int) -> int:
    """By what the kernels divide: head * factor >> 16 is head // group for all heads. Raises LaunchError."""
    factor = -(-65536 // group) if q_heads > group else 0
    last = q_heads - 1  # the factor is rounded up, so the last member of the last group is the first to go wrong
    if last * factor >> 16 != last // group:
        raise LaunchError(
            f"q_heads={q_heads} with kv_heads={q_heads // group} is not accepted: the kernels' division by a group "
            f"of {group} is not exact up to there; groups of up to 64, powers of two and kv_heads=1 are"
        )
    return factor


def attention_launch(
    name: str,
    *,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    q_scale: Array,
    k_scale: int,
    v_scale: int,
    scale_per_head: bool,
    cu_seqlens_q: int,
    cu_seqlens_k: int,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    q_heads: int,
    kv_heads: int,
    softmax_scale: float,
    delta: float,
    lse: int = 0,
    lse_head: int = 0,
    window: int | None = None,
    pages: Pages | None = None,
) -> Launch:
    """Launch of one attention call.

    q, k, v: e4m3 [Tq, Hq, 128], [Tk, Hkv, 128]; out: bf16 [Tq, Hq, 128]; the last dimension is contiguous.
    q_scale: fp32 [Tq, Hq]; k_scale, v_scale: addresses of fp32 [Hkv] (scale_per_head) or of one value.
    cu_seqlens_q, cu_seqlens_k: addresses of int32 [batch + 1]; the queries of a sequence are the last of its keys.
    lse: address of fp32 [Hq, Tq] with head stride lse_head in bytes, natural log; 0 for none.
    window: left window, a query at position p sees no key before p - window; None for none.
    pages: K and V lie in pages; then k and v are the arrays of all pages, with strides of a token inside a page.
    delta: rounding constant of lean P, in codes. Raises LaunchError.

    A NaN in Q, its scale or a visible K makes that row NaN and no other. A NaN in V reaches every query of the sequence
    that shares a tile of 128 keys with it or stands behind it: also the up to 127 queries before it.
    """
    made = kernel(name)
    for label, count in (("batch", batch), ("max_seqlen_q", max_seqlen_q), ("kv_heads", kv_heads)):
        if count < 1:
            raise LaunchError(f"{label}={count} is not accepted; it is at least 1")
    if q_heads % kv_heads:
        raise LaunchError(f"q_heads={q_heads} is not a multiple of kv_heads={kv_heads}")
    if not 1 <= q_heads <= 1024:
        raise LaunchError(f"q_heads={q_heads} is not accepted; it lies in 1 .. 1024")
    for label, array, width, tokens in (
        ("q", q, HEAD_DIM, max_seqlen_q),
        ("k", k, HEAD_DIM, max_seqlen_k),
        ("v", v, HEAD_DIM, max_seqlen_k),
        ("out", out, 2 * HEAD_DIM, max_seqlen_q),
    ):
        if array.row < width or array.head % 16 or array.row % 16 or array.address % 16:
            raise LaunchError(
                f"{label} has address {array.address:#x}, token stride {array.row} and head stride {array.head} bytes; "
                f"each is a multiple of 16 and a token at least {width}"
            )
        # K and V are addressed in 64 bits, row groups of Q and the output within one buffer.
        if label in ("q", "out") and array.row * tokens >= _LARGEST_OFFSET:
            raise LaunchError(
                f"{label} spans {array.row * tokens} bytes in one sequence; below {_LARGEST_OFFSET} works"
            )
    if window is not None and not 0 <= window < _NO_WINDOW:
        raise LaunchError(f"window={window} is not accepted; it lies in 0 .. {_NO_WINDOW - 1}, or None")
    if pages and (pages.tokens < 8 or pages.tokens & (pages.tokens - 1)):
        raise LaunchError(f"pages of {pages.tokens} tokens are not accepted; a power of two from 8 on is")
    if pages and (pages.k_stride % 16 or pages.v_stride % 16):
        raise LaunchError(f"page strides {pages.k_stride}, {pages.v_stride} are not multiples of 16 bytes")
    group = q_heads // kv_heads
    spread = q_heads % DIES == 0
    tiles = -(-max_seqlen_q // WORKGROUP_QUERIES)
    kernarg = ARGUMENTS.pack(
        q=q.address,
        k=k.address,
        v=v.address,
        out=out.address,
        lse=lse,
        q_scale=q_scale.address,
        k_scale=k_scale,
        v_scale=v_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=pages.table if pages else cu_seqlens_q,  # which begins with 0: the one page of packed keys
        block_table_row=pages.table_row if pages else 0,
        page_shift=pages.tokens.bit_length() - 1 if pages else 31,
        k_page=pages.k_stride if pages else 0,
        v_page=pages.v_stride if pages else 0,
        packed=0 if pages else 1,
        window=_NO_WINDOW if window is None else window,
        q_row=q.row,
        q_head=q.head,
        k_row=k.row,
        k_head=k.head,
        v_row=v.row,
        v_head=v.head,
        out_row=out.row,
        out_head=out.head,
        q_scale_row=q_scale.row,
        q_scale_head=q_scale.head,
        lse_head=lse_head,
        kv_scale_head=4 if scale_per_head else 0,
        group_magic=_group_magic(q_heads, group),
        q_tiles=tiles,
        xcd_mask=DIES - 1 if spread else 0,
        xcd_heads=q_heads // DIES if spread else 0,
        xcd_shift=DIES.bit_length() - 1 if spread else 0,
        scale_log2=softmax_scale * LOG2E,
        code_bias=code_bias(made.properties["lean"], delta),
    )
    return Launch(name, made.symbol, (q_heads, batch, tiles), 64 * WAVES, kernarg)
