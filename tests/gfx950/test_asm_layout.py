"""The data layout of the fp8 head-dim-128 kernels in plain numpy: what lies where, and that products come out right."""

from __future__ import annotations

import numpy as np
import pytest
from zyfa_kernels.asm.fp8_hd128 import layout

LANES = range(64)


def stage(tile: np.ndarray, address) -> np.ndarray:
    """A tile [128, 128] of bytes as the loads into LDS leave it."""
    lds = np.full(layout.TILE_BYTES, -1, np.int64)
    for row in range(128):
        for byte in range(128):
            at = address(row, byte)
            assert lds[at] == -1, "two elements share a byte"
            lds[at] = tile[row, byte]
    return lds


def staged_by_lanes(tile: np.ndarray, swizzle) -> np.ndarray:
    """The same, from the side of the loads: 16 instructions of 64 lanes, 16 consecutive bytes a lane."""
    lds = np.full(layout.TILE_BYTES, -1, np.int64)
    for wave in range(layout.WAVES):
        for part in range(2):
            for lane in LANES:
                row = 8 * wave + 64 * part + lane // 8
                chunk = (lane % 8) ^ swizzle(row)
                at = wave * 1024 + part * 8192 + 16 * lane
                lds[at : at + 16] = tile[row, 16 * chunk : 16 * chunk + 16]
    return lds


@pytest.fixture(scope="module")
def tile() -> np.ndarray:
    return np.random.default_rng(0).integers(-9, 10, (128, 128))


def test_loads_place_every_byte_where_the_reads_look(tile):
    k = stage(tile, lambda row, byte: layout.k_address(row, byte // 16) + byte % 16)
    np.testing.assert_array_equal(k, staged_by_lanes(tile, layout.k_swizzle))
    np.testing.assert_array_equal(stage(tile, layout.v_address), staged_by_lanes(tile, layout.v_swizzle))


def banks(addresses: list[int], width: int, count: int) -> list[int]:
    return [(a + 4 * w) // 4 % count for a in addresses for w in range(width // 4)]


@pytest.mark.parametrize(("count", "lanes"), [(32, 8), (64, 16)])
def test_k_reads_are_free_of_bank_conflicts(count, lanes):
    """Both views of the LDS: 32 banks serve 8 lanes of 16 bytes at once, 64 banks serve 16."""
    for quarter in range(4):
        reads = [layout.k_address(*layout.k_fragment(lane, quarter)) for lane in LANES]
        for first in range(0, 64, lanes):
            used = banks(reads[first : first + lanes], 16, count)
            assert len(set(used)) == len(used)


@pytest.mark.parametrize(("count", "lanes"), [(32, 16), (64, 32)])
def test_v_reads_are_free_of_bank_conflicts(count, lanes):
    for block in range(4):
        for part in range(4):
            reads = [layout.v_address(*layout.v_fragment(lane, block, part)) for lane in LANES]
            for first in range(0, 64, lanes):
                used = banks(reads[first : first + lanes], 8, count)
                assert len(set(used)) == len(used)


def operand_k(lane: int, byte: int) -> int:
    """k index of byte 0 .. 31 of a 32x32x64 operand: 16-byte chunks alternate between the halves of the wave."""
    return 32 * (byte // 16) + 16 * (lane // 32) + byte % 16


def matrix(rows: list[np.ndarray]) -> np.ndarray:
    """Operand [32, 64] from the 32 bytes that each lane holds."""
    out = np.zeros((32, 64), np.int64)
    for lane in LANES:
        for byte in range(32):
            out[lane % 32, operand_k(lane, byte)] = rows[lane][byte]
    return out


def test_scores_contract_the_same_dims_of_k_and_q(tile):
    lds = staged_by_lanes(tile, layout.k_swizzle)
    q = np.random.default_rng(1).integers(-9, 10, (32, 128))
    for block in range(4):
        scores = np.zeros((32, 32), np.int64)
        for half in range(2):
            a, b = [], []
            for lane in LANES:
                pieces, query = [], []
                for part in range(2):
                    row, chunk = layout.k_fragment(lane, 2 * half + part)
                    at = layout.k_address(row, chunk) + 32 * block * 128
                    pieces.append(lds[at : at + 16])
                    start = 32 * (2 * half + part) + 16 * (lane // 32)
                    query.append(q[lane % 32, start : start + 16])
                a.append(np.concatenate(pieces))
                b.append(np.concatenate(query))
            scores += matrix(a) @ matrix(b).T
        np.testing.assert_array_equal(scores, tile[32 * block : 32 * block + 32] @ q.T)


def test_v_reads_meet_the_keys_that_the_score_accumulators_hold(tile):
    """P^T stays in the lanes where the scores left it; the V reads bring its keys in the same order."""
    lds = staged_by_lanes(tile, layout.v_swizzle)
    p = np.random.default_rng(2).integers(0, 9, (128, 32))  # [key, query]
    for block in range(4):
        out = np.zeros((32, 32), np.int64)
        for half in range(2):
            codes = [
                np.array([p[64 * half + 32 * (n // 16) + layout.score_key(lane, n % 16), lane % 32] for n in range(32)])
                for lane in LANES
            ]
            values = np.zeros((64, 32), np.int64)
            for part in range(4):
                for group in range(0, 64, 16):
                    flat = []
                    for lane in range(group, group + 16):
                        row, byte = layout.v_fragment(lane, block, part)
                        at = layout.v_address(64 * half + row, byte)
                        flat.append(lds[at : at + 8])
                    flat = np.concatenate(flat)
                    for lane in range(16):
                        values[group + lane, 8 * part : 8 * part + 8] = flat[lane::16]
            out += matrix(list(values)) @ matrix(codes).T
        np.testing.assert_array_equal(out, tile[:, 32 * block : 32 * block + 32].T @ p)


def test_row_sum_operand_gives_each_lane_its_own_query():
    """16x16x128: lane 16 g + r supplies row or column r; g selects its 32 k. Ones only where the parities agree."""
    p = np.random.default_rng(3).integers(0, 9, (64, 32))  # bytes of lane l: half of the keys of query l % 32
    result = np.zeros((16, 16), np.int64)
    for g in range(4):
        for row in range(16):
            if (row // 4) % 2 == g % 2:
                for column in range(16):
                    result[row, column] += p[16 * g + column].sum()
    for lane in LANES:
        got = result[4 * (lane // 16), lane % 16]
        assert got == p[lane % 32].sum() + p[lane % 32 + 32].sum()
