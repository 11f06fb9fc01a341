"""FP8 prefill attention for Hopper, in Gluon: two consumer warpgroups of 64 queries and a producer warp.

The numerics are those of `prefill_kernel`, one maximum and one block exponent per tile of 128 keys. What is different
is the schedule. The producer fills a ring of stages, each a tile of V (key-major, from the workspace of `transpose`)
and the tile of K after it (from the cache, a TMA box per page, the pages fetched a tile ahead). A consumer, per tile:

    wait for S = Q·K            meanwhile the tensor cores work for the other consumer
    softmax                     row maximum, exponent, codes of P; one FFMA and half an F2IP a score where P is lean
    issue P·V and P·1           P stays in registers: the workspace holds the keys in the accumulator's order
    issue the next Q·K          back to back behind them
    wait for P·V                O = O · factor + P·V in fp32, while the next Q·K runs

CTAs are persistent and take tiles of queries from the longest to the shortest, dealt there and back, so that each gets
about the same work.

What each step gave on an H200, TFLOP/s at 4,096 / 16,384 tokens, 32 heads of 128, causal, pages of 16 tokens, V's
transposition included (raw figures: examples/results/prefill_h200.json; the spread between runs is up to 8%):

    plain Triton with the second-level accumulator                                      - / 341
    this schedule, K and V in rings of their own                                        - / 935
    one ring, one arrival a tile, pages fetched a tile ahead                          850 / 984
    NaN notes read 128 tiles at once, sections of heads dealt evenly to the CTAs      893 / 1143

P·1 on the tensor cores costs 0 to 4% against no row sum at all (a bound, not a result). Four stages instead of three,
and a barrier that makes the consumers take turns, changed nothing beyond the spread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from zyfa_kernels.triton.hopper_consumer import consumer
from zyfa_kernels.triton.hopper_producer import producer
from zyfa_kernels.triton.hopper_schedule import ROWS


@gluon.jit(
    do_not_specialize=[
        "first_sequence",
        "sequences",
        "table_stride",
        "m_blocks",
        "section",
        "tiles",
        "window",
        "lse_stride_h",
    ],
    do_not_specialize_on_alignment=["q_scale", "bad", "lse", "block_table", "cu_seqlens_q", "lengths_k"],
)
def hopper_kernel(
    q1_desc,
    q2_desc,
    k1_desc,
    k2_desc,
    vt_desc,
    q_scale,
    k,
    v,
    bad,
    k_scale,
    v_scale,
    out,
    out_scale,
    lse,
    block_table,
    cu_seqlens_q,
    lengths_k,
    first_sequence,
    sequences,
    table_stride,
    m_blocks,
    section,
    tiles,
    window,
    softmax_scale_log2,
    delta,
    lse_stride_h,
    heads: gl.constexpr,
    group: gl.constexpr,
    q_row_h: gl.constexpr,
    q_col_h: gl.constexpr,
    k_row_b: gl.constexpr,
    k_row_h: gl.constexpr,
    k_col_h: gl.constexpr,
    q_scale_stride_t: gl.constexpr,
    q_scale_stride_h: gl.constexpr,
    k_stride_b: gl.constexpr,
    k_stride_t: gl.constexpr,
    k_stride_h: gl.constexpr,
    v_stride_b: gl.constexpr,
    v_stride_t: gl.constexpr,
    v_stride_h: gl.constexpr,
    out_stride_t: gl.constexpr,
    out_stride_h: gl.constexpr,
    k_scale_stride: gl.constexpr,
    v_scale_stride: gl.constexpr,
    D2: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    LEAN: gl.constexpr,
    INT8: gl.constexpr,
    OFFSET: gl.constexpr,
    LSE: gl.constexpr,
    FP8_OUT: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Persistent CTAs over query tiles · heads · sequences; see the module.

    Descriptors: rows of Q, K and V key-major; Q and K of 192 channels as 128 (…1) and 64 (…2), else …2 equals …1.
    """
    D1: gl.constexpr = q1_desc.block_shape[1]
    D2_SHAPE: gl.constexpr = q2_desc.block_shape[1]
    DV: gl.constexpr = vt_desc.block_shape[0]
    q1_smem = gl.allocate_shared_memory(q1_desc.dtype, [2, ROWS, D1], q1_desc.layout)
    k1_smem = gl.allocate_shared_memory(k1_desc.dtype, [STAGES, 128, D1], k1_desc.layout)
    if D2:
        q2_smem = gl.allocate_shared_memory(q2_desc.dtype, [2, ROWS, D2_SHAPE], q2_desc.layout)
        k2_smem = gl.allocate_shared_memory(k2_desc.dtype, [STAGES, 128, D2_SHAPE], k2_desc.layout)
    else:
        q2_smem = q1_smem
        k2_smem = k1_smem
    v_smem = gl.allocate_shared_memory(vt_desc.dtype, [STAGES, DV, 128], vt_desc.layout)
    ONES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ones = gl.full([8, 128], 0x38, gl.uint8, gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
    ones_smem = gl.allocate_shared_memory(gl.float8e4nv, [8, 128], ONES, ones.to(gl.float8e4nv, bitcast=True))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for w in gl.static_range(2):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    rings = (q1_smem, q2_smem, k1_smem, k2_smem, v_smem, ones_smem)
    barriers = (q_full, q_empty, full, empty)
    batch = (block_table, cu_seqlens_q, lengths_k, table_stride, first_sequence, sequences)
    work = (m_blocks, section, tiles, window)
    tensors = (q_scale, k, v, bad, k_scale, v_scale, out, out_scale, lse)
    numbers = (softmax_scale_log2, delta, lse_stride_h)
    descriptors = (q1_desc, q2_desc, k1_desc, k2_desc, vt_desc)
    # fmt: off
    gl.warp_specialize(
        [
            (consumer, (
                rings, barriers, batch, work, tensors, numbers, gl.constexpr(0), heads, group, q_scale_stride_t,
                q_scale_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, out_stride_t,
                out_stride_h, k_scale_stride, v_scale_stride, D2, BLOCK, CAUSAL, WINDOW, LEAN, INT8, OFFSET, LSE,
                FP8_OUT, STAGES,
            )),
            (consumer, (
                rings, barriers, batch, work, tensors, numbers, gl.constexpr(1), heads, group, q_scale_stride_t,
                q_scale_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, out_stride_t,
                out_stride_h, k_scale_stride, v_scale_stride, D2, BLOCK, CAUSAL, WINDOW, LEAN, INT8, OFFSET, LSE,
                FP8_OUT, STAGES,
            )),
            (producer, (
                descriptors, rings, barriers, batch, work, heads, group, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h,
                D2, BLOCK, CAUSAL, WINDOW, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )
    # fmt: on
