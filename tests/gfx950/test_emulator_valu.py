"""Vector and scalar instructions against formulas written lane by lane in plain Python."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("triton")
from harness import bits, floats, run_snippet  # noqa: E402

RNG = np.random.default_rng(11)
NORMAL = RNG.standard_normal((4, 64)).astype(np.float32)
WIDE = (RNG.standard_normal((4, 64)) * 2.0 ** RNG.integers(-30, 30, (4, 64))).astype(np.float32)
WORDS = RNG.integers(0, 2**32, (4, 64), dtype=np.uint64).astype(np.uint32)
SMALL = RNG.integers(0, 40, (4, 64), dtype=np.uint64).astype(np.uint32)


def f32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def round_f32(exact: Fraction) -> float:
    """Nearest fp32 of an exact value, ties to even, by comparing with both neighbours."""
    guess = np.float32(float(exact))
    best = min(
        (guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))),
        key=lambda c: (abs(Fraction(float(c)) - exact), int(np.float32(c).view(np.uint32)) & 1),
    )
    return float(best)


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> width - 1 else x


def check_f32(code: str, formula, inputs: np.ndarray = NORMAL, tolerance: float = 0.0, **options):
    """`code` reads v1, v2, v3 and writes v4; `formula` takes Python floats."""
    got = floats(run_snippet(code, {f"v{k + 1}": bits(inputs[k]) for k in range(3)}, outputs=("v4",), **options)["v4"])
    want = np.array([formula(*(float(inputs[k, lane]) for k in range(3))) for lane in range(64)], np.float32)
    if tolerance:
        np.testing.assert_allclose(got, want, rtol=tolerance)
    else:
        np.testing.assert_array_equal(got, want)


def check_u32(code: str, formula, inputs: np.ndarray = WORDS):
    got = run_snippet(code, {f"v{k + 1}": inputs[k] for k in range(3)}, outputs=("v4",))["v4"]
    want = [formula(*(int(inputs[k, lane]) for k in range(3))) & 0xFFFFFFFF for lane in range(64)]
    assert [hex(x) for x in got.tolist()] == [hex(x) for x in want]


@pytest.mark.parametrize(
    ("code", "formula"),
    [
        ("v_add_f32_e32 v4, v1, v2", lambda a, b, c: round_f32(Fraction(a) + Fraction(b))),
        ("v_sub_f32_e32 v4, v1, v2", lambda a, b, c: round_f32(Fraction(a) - Fraction(b))),
        ("v_subrev_f32_e32 v4, v1, v2", lambda a, b, c: round_f32(Fraction(b) - Fraction(a))),
        ("v_mul_f32_e32 v4, v1, v2", lambda a, b, c: round_f32(Fraction(a) * Fraction(b))),
        ("v_mul_f32_e64 v4, -v1, |v2| mul:2", lambda a, b, c: 2 * round_f32(-Fraction(a) * abs(Fraction(b)))),
        ("v_add_f32_e64 v4, v1, v2 clamp", lambda a, b, c: min(max(round_f32(Fraction(a) + Fraction(b)), 0.0), 1.0)),
        ("v_add_f32_e64 v4, v1, v2 div:2", lambda a, b, c: round_f32(Fraction(a) + Fraction(b)) / 2),
        ("v_max_f32_e32 v4, v1, v2", lambda a, b, c: max(a, b)),
        ("v_min_f32_e32 v4, v1, v2", lambda a, b, c: min(a, b)),
        ("v_max3_f32 v4, v1, v2, v3", lambda a, b, c: max(a, b, c)),
        ("v_max3_f32 v4, |v1|, -v2, v3", lambda a, b, c: max(abs(a), -b, c)),
        ("v_min3_f32 v4, v1, v2, v3", lambda a, b, c: min(a, b, c)),
        ("v_med3_f32 v4, v1, v2, v3", lambda a, b, c: sorted((a, b, c))[1]),
        ("v_fma_f32 v4, v1, v2, v3", lambda a, b, c: round_f32(Fraction(a) * Fraction(b) + Fraction(c))),
        ("v_fma_f32 v4, v1, -v2, |v3|", lambda a, b, c: round_f32(-Fraction(a) * Fraction(b) + abs(Fraction(c)))),
        (
            "v_mov_b32_e32 v4, v3\nv_fmac_f32_e32 v4, v1, v2",
            lambda a, b, c: round_f32(Fraction(a) * Fraction(b) + Fraction(c)),
        ),
        ("v_fmaak_f32 v4, v1, v2, 0x3fc00000", lambda a, b, c: round_f32(Fraction(a) * Fraction(b) + Fraction(3, 2))),
        ("v_fmamk_f32 v4, v1, 0x3fc00000, v2", lambda a, b, c: round_f32(Fraction(a) * Fraction(3, 2) + Fraction(b))),
        ("v_rndne_f32_e32 v4, v1", lambda a, b, c: float(round(a))),
        ("v_floor_f32_e32 v4, v1", lambda a, b, c: float(math.floor(a))),
        ("v_ceil_f32_e32 v4, v1", lambda a, b, c: float(math.ceil(a))),
        ("v_trunc_f32_e32 v4, v1", lambda a, b, c: float(math.trunc(a))),
        ("v_ldexp_f32 v4, v1, 5", lambda a, b, c: a * 32),
        ("v_mul_f32_e32 v4, 0x40490fdb, v1", lambda a, b, c: round_f32(Fraction(f32(math.pi)) * Fraction(a))),
        ("v_mul_f32_e32 v4, 4.0, v1", lambda a, b, c: 4 * a),
    ],
)
@pytest.mark.parametrize("inputs", [NORMAL, WIDE], ids=["normal", "wide"])
def test_f32(code, formula, inputs):
    check_f32(code, formula, inputs)


@pytest.mark.parametrize(
    ("code", "formula", "inputs"),
    [
        ("v_exp_f32_e32 v4, v1", lambda a, b, c: 2.0**a, NORMAL * 20),
        ("v_log_f32_e32 v4, v1", lambda a, b, c: math.log2(a), np.abs(WIDE)),
        ("v_rcp_f32_e32 v4, v1", lambda a, b, c: 1 / a, WIDE),
        ("v_rsq_f32_e32 v4, v1", lambda a, b, c: 1 / math.sqrt(a), np.abs(WIDE)),
        ("v_sqrt_f32_e32 v4, v1", lambda a, b, c: math.sqrt(a), np.abs(WIDE)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_transcendental(code, formula, inputs):
    check_f32(code, formula, inputs.astype(np.float32), tolerance=2**-23)


def test_special_values():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0] + [1.0] * 58, np.float32)
    got = run_snippet(
        "v_exp_f32_e32 v2, v1\nv_log_f32_e32 v3, v1\nv_rcp_f32_e32 v4, v1\nv_max_f32_e32 v5, 2.0, v1",
        {"v1": bits(x)},
        outputs=("v2", "v3", "v4", "v5"),
    )
    exp, log, rcp, top = (floats(got[r])[:6] for r in ("v2", "v3", "v4", "v5"))
    np.testing.assert_array_equal(exp, [np.nan, np.inf, 0, 1, 1, 0.5])
    np.testing.assert_array_equal(log, [np.nan, np.inf, np.nan, -np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(rcp, [np.nan, 0, -0.0, np.inf, -np.inf, -1])
    np.testing.assert_array_equal(top, [2, np.inf, 2, 2, 2, 2])  # a NaN loses against a number


def test_denormals_follow_the_mode():
    tiny = np.full(64, 2.0**-130, np.float32)
    code = "v_add_f32_e32 v2, v1, v1\nv_mul_f32_e32 v3, 0.5, v1\nv_exp_f32_e32 v4, v5"
    inputs = {"v1": bits(tiny), "v5": bits(np.full(64, -140.0))}
    kept = run_snippet(code, inputs, outputs=("v2", "v3", "v4"), denorm=3)
    flushed = run_snippet(code, inputs, outputs=("v2", "v3", "v4"), denorm=0)
    assert floats(kept["v2"])[0] == 2.0**-129 and floats(kept["v3"])[0] == 2.0**-131
    assert floats(flushed["v2"])[0] == 0 and floats(flushed["v3"])[0] == 0
    assert floats(kept["v4"])[0] == 0 and floats(flushed["v4"])[0] == 0  # the transcendental unit always flushes


def test_fma_rounds_once_where_fp64_would_round_twice():
    # (1 + 2^-12)^2 · … : the exact sum lies just above a tie that fp64 cannot tell from the tie itself.
    a, b, c = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    inputs = {"v1": bits(np.full(64, a)), "v2": bits(np.full(64, b)), "v3": bits(np.full(64, c))}
    got = floats(run_snippet("v_fma_f32 v4, v1, v2, v3", inputs, outputs=("v4",))["v4"])[0]
    assert got == round_f32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))
    assert got != np.float32(np.float64(a) * np.float64(b) + np.float64(c))


@pytest.mark.parametrize(
    ("code", "formula"),
    [
        ("v_mov_b32_e32 v4, v1", lambda a, b, c: a),
        ("v_not_b32_e32 v4, v1", lambda a, b, c: ~a),
        ("v_add_u32_e32 v4, v1, v2", lambda a, b, c: a + b),
        ("v_sub_u32_e32 v4, v1, v2", lambda a, b, c: a - b),
        ("v_subrev_u32_e32 v4, v1, v2", lambda a, b, c: b - a),
        ("v_add_i32 v4, v1, v2", lambda a, b, c: a + b),
        ("v_sub_i32 v4, v1, v2", lambda a, b, c: a - b),
        ("v_and_b32_e32 v4, v1, v2", lambda a, b, c: a & b),
        ("v_or_b32_e32 v4, v1, v2", lambda a, b, c: a | b),
        ("v_xor_b32_e32 v4, v1, v2", lambda a, b, c: a ^ b),
        ("v_lshlrev_b32_e32 v4, 5, v2", lambda a, b, c: b << 5),
        ("v_lshlrev_b32_e32 v4, v1, v2", lambda a, b, c: b << (a & 31)),
        ("v_lshrrev_b32_e32 v4, v1, v2", lambda a, b, c: b >> (a & 31)),
        ("v_ashrrev_i32_e32 v4, v1, v2", lambda a, b, c: signed(b) >> (a & 31)),
        ("v_min_u32_e32 v4, v1, v2", lambda a, b, c: min(a, b)),
        ("v_max_u32_e32 v4, v1, v2", lambda a, b, c: max(a, b)),
        ("v_min_i32_e32 v4, v1, v2", lambda a, b, c: min(signed(a), signed(b))),
        ("v_max_i32_e32 v4, v1, v2", lambda a, b, c: max(signed(a), signed(b))),
        ("v_max3_i32 v4, v1, v2, v3", lambda a, b, c: max(signed(a), signed(b), signed(c))),
        ("v_min3_u32 v4, v1, v2, v3", lambda a, b, c: min(a, b, c)),
        ("v_med3_i32 v4, v1, v2, v3", lambda a, b, c: sorted((signed(a), signed(b), signed(c)))[1]),
        ("v_mul_u32_u24_e32 v4, v1, v2", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
        ("v_mul_i32_i24_e32 v4, v1, v2", lambda a, b, c: signed(a, 24) * signed(b, 24)),
        ("v_mad_u32_u24 v4, v1, v2, v3", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
        ("v_mul_lo_u32 v4, v1, v2", lambda a, b, c: a * b),
        ("v_mul_hi_u32 v4, v1, v2", lambda a, b, c: a * b >> 32),
        ("v_mul_hi_i32 v4, v1, v2", lambda a, b, c: signed(a) * signed(b) >> 32),
        ("v_add3_u32 v4, v1, v2, v3", lambda a, b, c: a + b + c),
        ("v_lshl_add_u32 v4, v1, 3, v3", lambda a, b, c: (a << 3) + c),
        ("v_add_lshl_u32 v4, v1, v2, 4", lambda a, b, c: (a + b) << 4),
        ("v_lshl_or_b32 v4, v1, 8, v3", lambda a, b, c: a << 8 | c),
        ("v_and_or_b32 v4, v1, v2, v3", lambda a, b, c: a & b | c),
        ("v_or3_b32 v4, v1, v2, v3", lambda a, b, c: a | b | c),
        ("v_xad_u32 v4, v1, v2, v3", lambda a, b, c: (a ^ b) + c),
        ("v_bfi_b32 v4, v1, v2, v3", lambda a, b, c: a & b | ~a & c),
        ("v_bfe_u32 v4, v1, 7, 9", lambda a, b, c: a >> 7 & 0x1FF),
        ("v_bfe_i32 v4, v1, 7, 9", lambda a, b, c: signed(a >> 7, 9)),
        ("v_bfrev_b32_e32 v4, v1", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
        ("v_bcnt_u32_b32 v4, v1, v2", lambda a, b, c: bin(a).count("1") + b),
        ("v_alignbit_b32 v4, v1, v2, v3", lambda a, b, c: (a << 32 | b) >> (c & 31)),
        ("v_alignbyte_b32 v4, v1, v2, 3", lambda a, b, c: (a << 32 | b) >> 24),
        ("v_bitop3_b32 v4, v1, v2, v3 bitop3:0x96", lambda a, b, c: a ^ b ^ c),
        ("v_bitop3_b32 v4, v1, v2, v3 bitop3:0xca", lambda a, b, c: a & b | ~a & c),
        ("v_ffbh_u32_e32 v4, v1", lambda a, b, c: 32 - a.bit_length() if a else -1),
        ("v_ffbl_b32_e32 v4, v1", lambda a, b, c: (a & -a).bit_length() - 1 if a else -1),
    ],
)
def test_u32(code, formula):
    check_u32(code, formula)


def test_perm_selects_bytes():
    def formula(a, b, c):
        source = [(a << 32 | b) >> 8 * k & 255 for k in range(8)]
        return sum(source[c >> 8 * k & 7] << 8 * k for k in range(4))

    inputs = WORDS.copy()
    inputs[2] &= 0x07070707
    check_u32("v_perm_b32 v4, v1, v2, v3", formula, inputs)
    check_u32("s_mov_b32 s8, 0x0c0d0c0d\nv_perm_b32 v4, v1, v2, s8", lambda a, b, c: 0x00FF00FF)


@pytest.mark.parametrize(
    ("code", "formula"),
    [
        ("v_lshlrev_b64 v[4:5], 9, v[2:3]", lambda q, n: q << 9),
        ("v_lshrrev_b64 v[4:5], 9, v[2:3]", lambda q, n: q >> 9),
        ("v_ashrrev_i64 v[4:5], 9, v[2:3]", lambda q, n: signed(q, 64) >> 9),
        ("v_mov_b64_e32 v[4:5], v[2:3]", lambda q, n: q),
        ("v_mad_u64_u32 v[4:5], s[10:11], v1, v1, v[2:3]", lambda q, n: n * n + q),
        ("v_lshl_add_u64 v[4:5], v[2:3], 3, v[2:3]", lambda q, n: (q << 3) + q),
    ],
)
def test_u64(code, formula):
    got = run_snippet(code, {"v1": WORDS[2], "v2": WORDS[0], "v3": WORDS[1]}, outputs=("v4", "v5"))
    for lane in range(64):
        want = formula(int(WORDS[0, lane]) | int(WORDS[1, lane]) << 32, int(WORDS[2, lane])) & (1 << 64) - 1
        assert int(got["v4"][lane]) | int(got["v5"][lane]) << 32 == want


def test_carry_chain():
    got = run_snippet(
        "v_add_co_u32_e32 v4, vcc, v1, v2\nv_addc_co_u32_e32 v5, vcc, v3, v3, vcc\n"
        "v_sub_co_u32_e64 v6, s[10:11], v1, v2\nv_subb_co_u32_e64 v7, s[12:13], v3, v3, s[10:11]",
        {f"v{k + 1}": WORDS[k] for k in range(3)},
        outputs=("v4", "v5", "v6", "v7"),
    )
    for lane in range(64):
        a, b, c = (int(WORDS[k, lane]) for k in range(3))
        assert int(got["v4"][lane]) | int(got["v5"][lane]) << 32 == ((c << 32 | a) + (c << 32 | b)) % 2**64
        assert int(got["v6"][lane]) | int(got["v7"][lane]) << 32 == (a - b) % 2**64


@pytest.mark.parametrize(
    ("name", "python"),
    [
        ("lt", lambda a, b: a < b),
        ("le", lambda a, b: a <= b),
        ("eq", lambda a, b: a == b),
        ("gt", lambda a, b: a > b),
        ("ge", lambda a, b: a >= b),
    ],
)
@pytest.mark.parametrize("kind", ["f32", "i32", "u32"])
def test_compare(name, python, kind):
    a, b = (WORDS[k].copy() for k in (0, 1))
    b[:20] = a[:20]
    if kind == "f32":
        a, b = bits(NORMAL[0]).copy(), bits(NORMAL[1]).copy()
        b[:20] = a[:20]
        a[5] = 0x7FC00000
    got = run_snippet(
        f"v_cmp_{name}_{kind}_e32 vcc, v1, v2\nv_cndmask_b32_e32 v3, 7, v1, vcc\n"
        f"v_cmp_{name}_{kind}_e64 s[10:11], v1, v2\nv_cndmask_b32_e64 v4, v2, v1, s[10:11]",
        {"v1": a, "v2": b},
        outputs=("v3", "v4"),
    )
    for lane in range(64):
        x, y = int(a[lane]), int(b[lane])
        u, w = (
            (x, y)
            if kind == "u32"
            else (signed(x), signed(y))
            if kind == "i32"
            else tuple(struct.unpack("<f", struct.pack("<I", z))[0] for z in (x, y))
        )
        assert got["v3"][lane] == (x if python(u, w) else 7)
        assert got["v4"][lane] == (x if python(u, w) else y)


def test_maximum3_keeps_nan_and_cmp_neq_sees_it():
    a, b, c = (bits(NORMAL[k]).copy() for k in range(3))
    a[3] = b[7] = 0x7FC00000
    code = "v_maximum3_f32 v4, v1, v2, v3\nv_cmp_neq_f32_e32 vcc, v1, v1\nv_cndmask_b32_e64 v5, 0, 1, vcc"
    got = run_snippet(code, {"v1": a, "v2": b, "v3": c}, outputs=("v4", "v5"))
    top = floats(got["v4"])
    for lane in range(64):
        if lane in (3, 7):
            assert np.isnan(top[lane])
        else:
            assert top[lane] == max(float(NORMAL[k, lane]) for k in range(3))
        assert got["v5"][lane] == int(lane == 3)


def test_compare_class():
    values = np.array([np.nan, -np.inf, -1.0, -(2.0**-140), -0.0, 0.0, 2.0**-140, 1.0, np.inf] + [2.0] * 55, np.float32)
    for bit in range(2, 10):
        got = (
            run_snippet(
                f"v_mov_b32_e32 v2, {1 << bit:#x}\nv_cmp_class_f32_e32 vcc, v1, v2\nv_cndmask_b32_e32 v3, 0, v2, vcc",
                {"v1": bits(values)},
                outputs=("v3",),
            )["v3"][:9]
            != 0
        )
        want = [None, 2, 3, 4, 5, 6, 7, 8, 9]
        assert got.tolist() == [w == bit for w in want]


def test_exec_mask_and_cmpx():
    got = run_snippet(
        "v_mov_b32_e32 v2, 1\ns_mov_b64 exec, 0xff0\nv_mov_b32_e32 v2, 2\nv_cmp_lt_u32_e32 vcc, 7, v0\n"
        "v_cndmask_b32_e64 v3, 5, 6, vcc\ns_mov_b64 exec, -1\nv_cmpx_gt_u32_e32 3, v0\nv_mov_b32_e32 v2, 9\n"
        "s_mov_b64 exec, -1\ns_mov_b32 s10, vcc_lo\ns_mov_b32 s11, vcc_hi\nv_mov_b32_e32 v3, 0",
        {},
        outputs=("v2", "v3"),
        scalar_outputs=(10, 11),
    )
    assert got["v2"].tolist() == [9] * 3 + [1] + [2] * 8 + [1] * 52


@pytest.mark.parametrize(
    ("control", "source"),
    [
        ("quad_perm:[3,2,1,0]", lambda i: (i & ~3) + 3 - (i & 3)),
        ("row_mirror", lambda i: (i & ~15) + 15 - (i & 15)),
        ("row_half_mirror", lambda i: (i & ~7) + 7 - (i & 7)),
        ("row_ror:4", lambda i: (i & ~15) + ((i - 4) & 15)),
        ("row_shr:3", lambda i: i - 3 if i % 16 >= 3 else None),
        ("row_shl:3", lambda i: i + 3 if i % 16 < 13 else None),
        ("row_newbcast:5", lambda i: (i & ~15) + 5),
        ("wave_shr:1", lambda i: i - 1 if i else None),
    ],
)
def test_dpp(control, source):
    inputs = {"v1": WORDS[0], "v2": WORDS[1], "v3": WORDS[2]}
    got = run_snippet(
        f"v_add_u32_dpp v3, v1, v2 {control} row_mask:0xf bank_mask:0xf\n"
        f"v_mov_b32_dpp v4, v1 {control} row_mask:0xf bank_mask:0xf bound_ctrl:0",
        inputs,
        outputs=("v3", "v4"),
    )
    for lane in range(64):
        origin = source(lane)
        moved = 0 if origin is None else int(WORDS[0, origin])
        assert got["v4"][lane] == moved
        kept = int(WORDS[2, lane])
        assert got["v3"][lane] == (kept if origin is None else (moved + int(WORDS[1, lane])) & 0xFFFFFFFF)


def test_sdwa():
    got = run_snippet(
        "v_add_u32_sdwa v3, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1\n"
        "v_or_b32_sdwa v4, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0 src1_sel:BYTE_3",
        {"v1": WORDS[0], "v2": WORDS[1], "v4": WORDS[3]},
        outputs=("v3", "v4"),
    )
    for lane in range(64):
        a, b, old = (int(WORDS[k, lane]) for k in (0, 1, 3))
        assert got["v3"][lane] == (a >> 16 & 255) + (b >> 16)
        assert got["v4"][lane] == old & ~0xFF00 | ((a & 255) | b >> 24) << 8


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("v_pk_mul_f32 v[6:7], v[2:3], v[4:5]", lambda a, b: a * b),
        ("v_pk_add_f32 v[6:7], v[2:3], v[4:5]", lambda a, b: a + b),
    ],
)
def test_packed_f32(code, function):
    inputs = {f"v{k + 2}": bits(NORMAL[k]) for k in range(4)}
    got = run_snippet(
        code + "\n" + code.replace("v[6:7]", "v[8:9]") + " op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[1,0]",
        inputs,
        outputs=("v6", "v7", "v8", "v9"),
    )
    a0, a1, b0, b1 = NORMAL
    np.testing.assert_array_equal(floats(got["v6"]), function(a0, b0))
    np.testing.assert_array_equal(floats(got["v7"]), function(a1, b1))
    np.testing.assert_array_equal(floats(got["v8"]), function(-a1, b0))
    np.testing.assert_array_equal(floats(got["v9"]), function(a0, b1))


def test_packed_fma_with_scalar_pair():
    inputs = {f"v{k + 2}": bits(NORMAL[k]) for k in range(4)}
    got = run_snippet(
        "v_pk_fma_f32 v[6:7], v[2:3], s[10:11], v[4:5]", inputs, {10: 0x40400000, 11: 0xBF000000}, outputs=("v6", "v7")
    )
    for lane in range(64):
        for half, factor in ((0, 3.0), (1, -0.5)):
            want = round_f32(
                Fraction(float(NORMAL[half, lane])) * Fraction(factor) + Fraction(float(NORMAL[2 + half, lane]))
            )
            assert floats(got[f"v{6 + half}"])[lane] == want


def test_packed_move():
    got = run_snippet(
        "v_pk_mov_b32 v[6:7], v[2:3], v[4:5] op_sel:[1,0]",
        {f"v{k + 2}": WORDS[k] for k in range(4)},
        outputs=("v6", "v7"),
    )
    np.testing.assert_array_equal(got["v6"], WORDS[1])
    np.testing.assert_array_equal(got["v7"], WORDS[2])


@pytest.mark.parametrize("name", ["v_permlane32_swap_b32", "v_permlane16_swap_b32"])
def test_permlane_swap(name):
    got = run_snippet(f"{name} v1, v2", {"v1": WORDS[0], "v2": WORDS[1]}, outputs=("v1", "v2"))
    width = 32 if "32" in name[:12] else 16
    a, b = WORDS[0].copy(), WORDS[1].copy()
    for lane in range(64):
        if lane // width % 2:
            a[lane] = WORDS[1][lane - width]
        else:
            b[lane] = WORDS[0][lane + width]
    np.testing.assert_array_equal(got["v1"], a)
    np.testing.assert_array_equal(got["v2"], b)


def test_lane_access():
    got = run_snippet(
        "v_readlane_b32 s10, v1, 37\nv_mov_b32_e32 v2, 0\nv_writelane_b32 v2, s10, 5\ns_mov_b64 exec, 0x80\n"
        "v_readfirstlane_b32 s11, v1\ns_mov_b64 exec, -1\nv_mbcnt_lo_u32_b32 v3, -1, 0\n"
        "v_mbcnt_hi_u32_b32 v3, -1, v3",
        {"v1": WORDS[0]},
        outputs=("v2", "v3"),
        scalar_outputs=(10, 11),
    )
    assert got[10] == WORDS[0, 37] and got[11] == WORDS[0, 7]
    assert got["v2"][5] == WORDS[0, 37] and got["v2"].sum(dtype=np.uint64) == WORDS[0, 37]
    assert got["v3"].tolist() == list(range(64))


def test_accvgpr_moves():
    got = run_snippet(
        "v_accvgpr_read_b32 v2, a9\nv_accvgpr_write_b32 a4, v1\nv_accvgpr_mov_b32 a5, a9",
        {"v1": WORDS[0], "a9": WORDS[1]},
        outputs=("v2", "a4", "a5"),
    )
    np.testing.assert_array_equal(got["v2"], WORDS[1])
    np.testing.assert_array_equal(got["a4"], WORDS[0])
    np.testing.assert_array_equal(got["a5"], WORDS[1])
