"""Where each byte lies: tiles in LDS, fragments in registers. Plain integer functions, for the generator and tests.

LDS holds STAGES tiles of K and as many of V, each 128 keys of 128 bytes in rows of 128 bytes. A row's eight 16-byte
chunks are permuted by an exclusive or with a function of the row, which spreads the rows that one read touches over all
banks (with 32 banks of 4 bytes as well as with 64). The loads into LDS place lane after lane, so the permutation is
applied to the global address instead.
"""

from __future__ import annotations

HEAD_DIM = 128
TILE_KEYS = 128
BLOCK_KEYS = 64
WAVE_QUERIES = 32
WAVES = 8
WORKGROUP_QUERIES = WAVES * WAVE_QUERIES
ROW_BYTES = HEAD_DIM  # one byte an element
TILE_BYTES = TILE_KEYS * ROW_BYTES
STAGES = 4
K_BASE = 0
V_BASE = STAGES * TILE_BYTES
LDS_BYTES = 2 * STAGES * TILE_BYTES
CHUNK = 16


def k_swizzle(row: int) -> int:
    """Exclusive-or mask of the chunk index for a K row: `ds_read_b128` reads one chunk of 32 consecutive rows."""
    return (row & 7) ^ ((row >> 3) & 1)


def v_swizzle(row: int) -> int:
    """The same for V: `ds_read_b64_tr_b8` reads 32 bytes of rows r .. r+3 and r+8 .. r+11."""
    return (row & 3) | (((row >> 3) & 1) << 2)


def k_address(row: int, chunk: int) -> int:
    """LDS byte of a K chunk inside its stage."""
    return row * ROW_BYTES + ((chunk ^ k_swizzle(row)) * CHUNK)


def v_address(row: int, byte: int) -> int:
    """LDS byte of element `byte` of a V row inside its stage."""
    return row * ROW_BYTES + (((byte // CHUNK) ^ v_swizzle(row)) * CHUNK) + byte % CHUNK


def k_fragment(lane: int, quarter: int) -> tuple[int, int]:
    """(row, chunk) that a lane reads for quarter 0 .. 3 of a 32-key block: two quarters make one 32x32x64 operand."""
    return lane % 32, 2 * quarter + lane // 32


def score_key(lane: int, element: int) -> int:
    """Key, in a 32-key block, of accumulator element 0 .. 15 of S^T = K Q^T; its query is lane % 32."""
    return 8 * (element // 4) + 4 * (lane // 32) + element % 4


def v_fragment(lane: int, dv_block: int, part: int) -> tuple[int, int]:
    """(row in the 64-key block, first byte) whose 8 bytes a lane supplies to transposing read `part` 0 .. 3.

    The 16 lanes of a group supply 8 rows of 16 bytes and receive one column each. Rows come in the order in which the
    accumulators of S^T hold their keys, so that P needs no move between lanes.
    """
    half, columns, row, part_of_row = lane // 32, (lane // 16) % 2, (lane % 16) // 2, lane % 2
    key = 16 * part + 8 * (row // 4) + 4 * half + row % 4
    return key, 32 * dv_block + 16 * columns + 8 * part_of_row
