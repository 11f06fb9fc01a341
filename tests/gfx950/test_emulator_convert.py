"""Conversions against definitions: nearest code by search over all codes, ties to even."""

from __future__ import annotations

import struct

import numpy as np
import pytest

pytest.importorskip("triton")
from harness import bits, floats, run_snippet  # noqa: E402

RNG = np.random.default_rng(12)


def decode_minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of a small float by its definition; no specials."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


E4M3 = [decode_minifloat(c, 4, 3, 7) if c & 0x7F != 0x7F else float("nan") for c in range(256)]
E5M2 = [
    decode_minifloat(c, 5, 2, 15) if c & 0x7C != 0x7C else float("inf" if c & 3 == 0 else "nan") for c in range(256)
]
E2M1 = [decode_minifloat(c, 2, 1, 1) for c in range(16)]
E4M3_CODES = [c for c in range(127)]
E5M2_CODES = [c for c in range(0x7C)]


def nearest(x: float, table: list[float], codes: list[int], limit: float, over: int) -> int:
    """Code of the nearest positive value, ties to the even code, with the sign of x; `over` past `limit`."""
    sign = 128 if np.signbit(x) else 0
    x = abs(x)
    if np.isnan(x) or x > limit:
        return sign | (over if not np.isnan(x) else 0x7F)
    return sign | min(codes, key=lambda c: (abs(table[c] - x), c & 1))


SAMPLES = np.concatenate(
    [
        np.array([0, -0.0, 448, 463.9, 464, 464.1, 500, -1e9, np.nan, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 1.0625, 1.1875]),
        RNG.standard_normal(40) * 2.0 ** RNG.integers(-12, 9, 40),
        np.array(E4M3)[[1, 7, 8, 9, 0x7D, 0x7E, 0x81, 0xFE, 3, 5]],
    ]
).astype(np.float32)


def test_pack_fp8():
    other = SAMPLES[::-1].copy()
    got = run_snippet(
        "v_cvt_pk_fp8_f32 v3, v1, v2\nv_cvt_pk_fp8_f32 v4, v1, v2 op_sel:[0,0,1]\nv_cvt_pk_fp8_f32 v5, -v1, |v2|",
        {"v1": bits(SAMPLES), "v2": bits(other), "v3": bits(SAMPLES), "v4": bits(SAMPLES), "v5": bits(SAMPLES)},
        outputs=("v3", "v4", "v5"),
    )
    for lane in range(64):
        # Past 448 the result is NaN (464 is a tie that goes to the even code of 448).
        low, high = (nearest(float(x[lane]), E4M3, E4M3_CODES, 464, 0x7F) for x in (SAMPLES, other))
        kept = int(bits(SAMPLES)[lane])
        assert got["v3"][lane] == kept & 0xFFFF0000 | low | high << 8
        assert got["v4"][lane] == kept & 0xFFFF | (low | high << 8) << 16
        assert got["v5"][lane] & 0xFF == low ^ 0x80 and got["v5"][lane] >> 8 & 0xFF == high & 0x7F


def test_pack_fp8_clamps_with_fp16_ovfl():
    got = run_snippet(
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\nv_mov_b32_e32 v3, 0\nv_cvt_pk_fp8_f32 v3, v1, v1",
        {"v1": bits(SAMPLES)},
        outputs=("v3",),
    )
    for lane in range(64):
        want = nearest(float(SAMPLES[lane]), E4M3, E4M3_CODES, np.inf, 0x7E)
        assert got["v3"][lane] & 0xFF == want


def test_pack_bf8():
    x = (SAMPLES * 100).astype(np.float32)
    x[-1] = 1e6
    got = run_snippet("v_mov_b32_e32 v3, 0\nv_cvt_pk_bf8_f32 v3, v1, v1", {"v1": bits(x)}, outputs=("v3",))["v3"]
    for lane in range(64):
        want = nearest(float(x[lane]), E5M2, E5M2_CODES, 61440 - 1, 0x7C)
        if np.isnan(x[lane]):
            assert got[lane] & 0x7C == 0x7C and got[lane] & 3
        else:
            assert got[lane] & 0xFF == want


@pytest.mark.parametrize("exponent", [-3, 0, 5])
def test_scaled_pack_divides_by_the_power_of_two(exponent):
    scale = np.full(64, 1.75 * 2.0**exponent)  # only the exponent counts
    got = run_snippet(
        "v_mov_b32_e32 v3, 0\nv_cvt_scalef32_pk_fp8_f32 v3, v1, v1, v2\n"
        "v_cvt_scalef32_pk_fp8_f32 v3, v1, v1, v2 op_sel:[0,0,0,1]",
        {"v1": bits(SAMPLES), "v2": bits(scale)},
        outputs=("v3",),
    )["v3"]
    for lane in range(64):
        want = nearest(float(SAMPLES[lane]) / 2.0**exponent, E4M3, E4M3_CODES, 464, 0x7F)
        assert got[lane] == want * 0x01010101


def test_scaled_pack_fp4():
    x = np.clip(SAMPLES, -20, 20)
    x[np.isnan(x)] = 0
    got = run_snippet(
        "v_mov_b32_e32 v3, 0\nv_cvt_scalef32_pk_fp4_f32 v3, v1, v1, v2\n"
        "v_cvt_scalef32_pk_fp4_f32 v3, v1, v1, v2 op_sel:[0,0,1,1]",
        {"v1": bits(x), "v2": bits(np.full(64, 2.0))},
        outputs=("v3",),
    )["v3"]
    for lane in range(64):
        value = float(x[lane]) / 2
        code = min(range(8), key=lambda c: (abs(E2M1[c] - min(abs(value), 6.0)), c & 1)) | (
            8 if np.signbit(value) else 0
        )
        assert got[lane] == (code | code << 4) * 0x01000001


def test_unpack_fp8():
    words = RNG.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    got = run_snippet(
        "v_cvt_pk_f32_fp8_e32 v[2:3], v1\nv_cvt_pk_f32_fp8_sdwa v[4:5], v1 src0_sel:WORD_1\n"
        "v_cvt_f32_fp8_e32 v6, v1\nv_cvt_f32_fp8_sdwa v7, v1 src0_sel:BYTE_3\nv_cvt_pk_f32_bf8_e32 v[8:9], v1\n"
        "v_cvt_scalef32_pk_f32_fp8 v[10:11], v1, 4.0 op_sel:[1,0]",
        {"v1": words},
        outputs=tuple(f"v{k}" for k in range(2, 12)),
    )
    for lane, word in enumerate(words.tolist()):
        byte = [word >> 8 * k & 255 for k in range(4)]
        want = [E4M3[b] for b in (*byte, byte[0], byte[3])] + [E5M2[byte[0]], E5M2[byte[1]]]
        want += [4 * E4M3[byte[2]], 4 * E4M3[byte[3]]]
        np.testing.assert_array_equal([floats(got[f"v{k}"])[lane] for k in range(2, 12)], np.array(want, np.float32))


def test_pack_bf16():
    x = np.concatenate(
        [SAMPLES[:30], np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -np.inf], np.float32), RNG.standard_normal(30)]
    ).astype(np.float32)
    got = run_snippet("v_cvt_pk_bf16_f32 v2, v1, -v1", {"v1": bits(x)}, outputs=("v2",))["v2"]
    for lane, value in enumerate(x.tolist()):
        low = int(got[lane]) & 0xFFFF
        decoded = struct.unpack("<f", struct.pack("<I", low << 16))[0]
        if np.isnan(value):
            assert np.isnan(decoded)
            continue
        neighbours = [struct.unpack("<f", struct.pack("<I", (low + d & 0xFFFF) << 16))[0] for d in (-1, 1)]
        assert all(abs(decoded - value) <= abs(n - value) or np.isnan(n) for n in neighbours) or np.isinf(decoded)
        assert int(got[lane]) >> 16 == low ^ 0x8000
        if abs(value) in (1 + 2.0**-8, 1 + 3 * 2.0**-8):
            assert low & 1 == 0  # ties to even


@pytest.mark.parametrize("byte", [0, 1, 2, 3])
def test_pack_u8(byte):
    x = np.array(
        [-1, -0.5, 0, 0.5, 1.5, 2.5, 254.5, 255.4, 256, 1e9, -1e9, np.nan, np.inf, 126.49] + [7.3] * 50, np.float32
    )
    old = RNG.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    got = run_snippet(f"v_cvt_pk_u8_f32 v2, v1, {byte}, v3", {"v1": bits(x), "v3": old}, outputs=("v2",))["v2"]
    for lane, value in enumerate(x.tolist()):
        clipped = 0 if np.isnan(value) else min(max(value, 0), 255)
        want = round(clipped)
        assert got[lane] == int(old[lane]) & ~(255 << 8 * byte) | want << 8 * byte


def test_integers():
    x = np.array([0.5, -0.5, 1.5, -1.9, 3e9, -3e9, 5e9, np.nan, np.inf, -np.inf, 2**31 - 64] + [7.9] * 53, np.float32)
    n = RNG.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    got = run_snippet(
        "v_cvt_i32_f32_e32 v3, v1\nv_cvt_u32_f32_e32 v4, v1\nv_cvt_f32_i32_e32 v5, v2\nv_cvt_f32_u32_e32 v6, v2\n"
        "v_cvt_f32_ubyte2_e32 v7, v2",
        {"v1": bits(x), "v2": n},
        outputs=tuple(f"v{k}" for k in range(3, 8)),
    )
    for lane, value in enumerate(x.tolist()):

        def clip(low, high, value=value):
            if np.isnan(value):
                return 0
            return int(min(max(value, low), high))

        assert int(got["v3"][lane]) == clip(-(2**31), 2**31 - 1) & 0xFFFFFFFF
        assert int(got["v4"][lane]) == clip(0, 2**32 - 1)
        word = int(n[lane])
        signed = word - 2**32 if word >> 31 else word
        assert floats(got["v5"])[lane] == np.float32(signed) and floats(got["v6"])[lane] == np.float32(word)
        assert floats(got["v7"])[lane] == word >> 16 & 255


def test_half():
    x = np.concatenate([RNG.standard_normal(60), [65504, 65520, 2.0**-24, np.nan]]).astype(np.float32)
    got = run_snippet(
        "v_cvt_f16_f32_e32 v2, v1\nv_cvt_f32_f16_e32 v3, v2\nv_cvt_pkrtz_f16_f32 v4, v1, v1",
        {"v1": bits(x)},
        outputs=("v2", "v3", "v4"),
    )
    for lane, value in enumerate(x.tolist()):
        half = struct.unpack("<e", struct.pack("<H", int(got["v2"][lane]) & 0xFFFF))[0]
        try:
            want = struct.unpack("<e", struct.pack("<e", value))[0]
        except OverflowError:
            want = np.inf
        np.testing.assert_array_equal(half, want)
        np.testing.assert_array_equal(floats(got["v3"])[lane], np.float32(want))
        toward = struct.unpack("<e", struct.pack("<H", int(got["v4"][lane]) & 0xFFFF))[0]
        assert np.isnan(value) or abs(toward) <= abs(value)


def test_pack_unorm16():
    x = np.array([-1, 0, 0.5 / 65535, 1.5 / 65535, 0.25, 1, 2, np.nan, np.inf, 0.99999] + [0.3] * 54, np.float32)
    got = run_snippet("v_cvt_pknorm_u16_f32 v2, v1, v1", {"v1": bits(x)}, outputs=("v2",))["v2"]
    for lane, value in enumerate(x.tolist()):
        unit = 0.0 if np.isnan(value) else min(max(value, 0.0), 1.0)
        low, high = int(got[lane]) & 0xFFFF, int(got[lane]) >> 16
        assert low == high and abs(low - unit * 65535) <= 0.5 + 2**-8
