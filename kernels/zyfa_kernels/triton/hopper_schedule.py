"""Which tile of queries a CTA of the Hopper kernel takes when, and which keys it needs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # queries of a consumer: the height of a wgmma


@gluon.jit
def count_turns(m_blocks, combinations, section):
    """How often a CTA takes a tile: a whole number of rounds for each section of heads."""
    return gl.cdiv(combinations, section) * gl.cdiv(section * m_blocks, gl.num_programs(0))


@gluon.jit
def take(turn, m_blocks, heads, combinations, section):
    """(whether there is one, query tile, head, sequence) of this CTA's turn-th tile.

    The (sequence, head) pairs are taken in sections; in each the longest tiles come first, dealt to the CTAs there and
    back, and the next section begins at the other end.
    """
    n = gl.num_programs(0)
    pid = gl.program_id(0)
    rounds = gl.cdiv(section * m_blocks, n)
    number = turn // rounds
    dealt = turn % rounds
    rank = dealt * n + gl.where((number + dealt) % 2 == 0, pid, n - 1 - pid)
    size = gl.minimum(section, combinations - number * section)
    tile_m = m_blocks - 1 - rank // size
    combination = number * section + rank % size
    return tile_m >= 0, tile_m, combination % heads, combination // heads


@gluon.jit
def extent(
    seq, tile_m, cu_seqlens_q, lengths_k, window, PAGED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):
    """(first token, queries, first key, keys, first and end tile of keys) of a tile of queries."""
    first_row = gl.load(cu_seqlens_q + seq)
    queries = gl.load(cu_seqlens_q + seq + 1) - first_row
    if PAGED:
        first_key = gl.to_tensor(0)
        length = gl.load(lengths_k + seq)
    else:
        first_key = gl.load(lengths_k + seq)
        length = gl.load(lengths_k + seq + 1) - first_key
    row = tile_m * (2 * ROWS)
    first_position = length - queries + row
    end = length
    if CAUSAL:
        end = gl.minimum(end, first_position + gl.minimum(2 * ROWS, queries - row))
    begin = gl.to_tensor(0)
    if WINDOW:
        begin = gl.maximum(first_position - window, 0) // 128
    # At least one tile, all masked: then no loop is empty.
    end = gl.maximum((end + 127) // 128, begin + 1)
    return first_row, queries, first_key, length, begin, end


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring and the phase of its barriers."""
    stage += 1
    if stage == STAGES:
        stage = gl.to_tensor(0)
        phase ^= 1
    return stage, phase
