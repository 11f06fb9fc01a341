"""The producer warp of the Hopper kernel: K from the cache by a TMA box per page, V from the workspace."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from zyfa_kernels.triton.hopper_schedule import ROWS, advance, count_turns, extent, take

# Its name in Triton 3.7 and later, and in 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _pages(table_row, tile, length, BLOCK: gl.constexpr, BOX: gl.constexpr):
    """The page of each box of a tile of keys; page 0 past the end, whose scores are masked."""
    pages = ()
    if BLOCK:
        for part in gl.static_range(128 // BOX):
            key = tile * 128 + part * BOX
            pages = pages + (gl.load(table_row + key // BLOCK, mask=key < length, other=0),)  # type: ignore[assignment]
    return pages


@gluon.jit
def producer(
    descriptors,
    rings,
    barriers,
    batch,
    work,
    heads: gl.constexpr,
    group: gl.constexpr,
    q_row_h: gl.constexpr,
    q_col_h: gl.constexpr,
    k_row_b: gl.constexpr,
    k_row_h: gl.constexpr,
    k_col_h: gl.constexpr,
    D2: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the rings of a CTA: its queries, and in each stage a tile of V and the tile of K after it."""
    q1_desc, q2_desc, k1_desc, k2_desc, vt_desc = descriptors
    q1_smem, q2_smem, k1_smem, k2_smem, v_smem, ones_smem = rings
    q_full, q_empty, full, empty = barriers
    block_table, cu_seqlens_q, lengths_k, table_stride, first_sequence, sequences = batch
    m_blocks, section, tiles, window = work
    PAGED: gl.constexpr = BLOCK > 0
    BOX: gl.constexpr = k1_desc.block_shape[0]
    D1: gl.constexpr = q1_desc.block_shape[1]
    DV: gl.constexpr = vt_desc.block_shape[0]
    kv_heads = heads // group
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    q_phase = gl.to_tensor(1)
    for turn in range(count_turns(m_blocks, heads * sequences, section)):
        exists, tile_m, head, local = take(turn, m_blocks, heads, heads * sequences, section)
        if exists:
            seq = first_sequence + local
            first_row, queries, first_key, length, begin, end = extent(
                seq, tile_m, cu_seqlens_q, lengths_k, window, PAGED, CAUSAL, WINDOW
            )
            if tile_m * (2 * ROWS) < queries:
                kv_head = head // group
                for w in gl.static_range(2):
                    mbarrier.wait(q_empty.index(w), q_phase)
                    mbarrier.expect(q_full.index(w), ROWS * (D1 + D2))
                    row = first_row + tile_m * (2 * ROWS) + w * ROWS + head * q_row_h
                    tma_load(q1_desc, [row, head * q_col_h], q_full.index(w), q1_smem.index(w))
                    if D2:
                        tma_load(q2_desc, [row, head * q_col_h + D1], q_full.index(w), q2_smem.index(w))
                q_phase ^= 1
                table_row = block_table
                if PAGED:
                    table_row += seq.to(gl.int64) * table_stride
                pages = _pages(table_row, begin, length, BLOCK, BOX)
                for tile in range(begin, end + 1):
                    mbarrier.wait(empty.index(stage), phase)
                    mbarrier.expect(full.index(stage), 128 * (D1 + D2), pred=tile == begin)
                    mbarrier.expect(full.index(stage), 128 * (D1 + D2 + DV), pred=(tile > begin) & (tile < end))
                    mbarrier.expect(full.index(stage), 128 * DV, pred=tile == end)
                    if tile > begin:
                        v_row = ((local * tiles + tile - 1) * kv_heads + kv_head) * DV
                        tma_load(vt_desc, [v_row, 0], full.index(stage), v_smem.index(stage))
                    if tile < end:
                        for part in gl.static_range(128 // BOX):
                            key = tile * 128 + part * BOX
                            if PAGED:
                                row = pages[part] * k_row_b + key % BLOCK + kv_head * k_row_h
                            else:
                                row = first_key + key + kv_head * k_row_h
                            column = kv_head * k_col_h
                            rows_smem = k1_smem.index(stage).slice(part * BOX, BOX)
                            tma_load(k1_desc, [row, column], full.index(stage), rows_smem)
                            if D2:
                                rows_smem = k2_smem.index(stage).slice(part * BOX, BOX)
                                tma_load(k2_desc, [row, column + D1], full.index(stage), rows_smem)
                    # The next tile's pages arrive while this one's room is waited for.
                    pages = _pages(table_row, tile + 1, length, BLOCK, BOX)
                    stage, phase = advance(stage, phase, STAGES)
