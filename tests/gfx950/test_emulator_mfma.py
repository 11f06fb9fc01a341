"""Matrix instructions against C[i][j] + sum_k A[i][k]·B[k][j], with operands placed element by element."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")
from harness import run_snippet  # noqa: E402

RNG = np.random.default_rng(13)


def place_k(size: int, k: int, per_lane: int, two_runs: bool):
    """(lane, element) that holds (row, k) of an operand with `size` rows: straight from GFX950.md's wording."""
    where = {}
    for lane in range(64):
        group, row = lane // size, lane % size
        for element in range(per_lane):
            if two_runs:
                index = 16 * group + element if element < 16 else k // 2 + 16 * group + element - 16
            else:
                index = per_lane * group + element
            where[row, index] = (lane, element)
    return where


def result_place(size: int):
    """(element, lane) that holds (row, column) of the result."""
    where = {}
    for lane in range(64):
        for element in range(size * size // 64):
            if size == 32:
                row = 8 * (element // 4) + 4 * (lane // 32) + element % 4
            else:
                row = 4 * (lane // 16) + element
            where[row, lane % size] = (element, lane)
    return where


def pack(matrix_codes: np.ndarray, bits: int, where: dict) -> np.ndarray:
    """Codes [row, k] to lane registers uint32 [n, 64], low bits first."""
    per_lane = 1 + max(element for _, element in where.values())
    lanes = np.zeros(64, object)
    for (row, k), (lane, element) in where.items():
        lanes[lane] += int(matrix_codes[row, k]) << bits * element
    count = per_lane * bits // 32
    return np.array([[lanes[lane] >> 32 * n & 0xFFFFFFFF for lane in range(64)] for n in range(count)], np.uint32)


FORMATS = {
    "fp8": (ml_dtypes.float8_e4m3fn, 8),
    "bf8": (ml_dtypes.float8_e5m2, 8),
    "fp6": (ml_dtypes.float6_e2m3fn, 6),
    "bf6": (ml_dtypes.float6_e3m2fn, 6),
    "fp4": (ml_dtypes.float4_e2m1fn, 4),
    "bf16": (ml_dtypes.bfloat16, 16),
    "f16": (np.float16, 16),
    "i8": (np.int8, 8),
}


def random_operand(kind: str, shape):
    dtype, bits = FORMATS[kind]
    if kind == "i8":
        values = RNG.integers(-128, 128, shape).astype(np.int8)
    else:
        values = np.clip(RNG.standard_normal(shape), -5, 5).astype(np.float32).astype(dtype)
    codes = values.view(np.uint16 if bits == 16 else np.uint8)
    return values.astype(np.float64), codes.astype(np.int64)


def run_matrix(
    text: str,
    size: int,
    k: int,
    kinds: tuple[str, str],
    *,
    two_runs=(False, False),
    scales=None,
    c_kind=np.float32,
    constant: float | None = None,
    acc: bool = False,
):
    """Run one MFMA and compare it with the product of the matrices."""
    values, registers, vectors = [], [], {}
    start = 16
    for kind, runs in zip(kinds, two_runs, strict=True):
        dense, codes = random_operand(kind, (size, k))
        packed = pack(codes, FORMATS[kind][1], place_k(size, k, k * size // 64, runs))
        vectors |= {f"v{start + n}": packed[n] for n in range(len(packed))}
        registers.append(f"v[{start}:{start + len(packed) - 1}]")
        values.append(dense)
        start += 16
    elements, where = size * size // 64, result_place(size)
    c = (RNG.standard_normal((size, size)) * 10).astype(c_kind)
    letter = "a" if acc else "v"
    for (row, column), (element, lane) in where.items():
        vectors.setdefault(f"{letter}{64 + element}", np.zeros(64, np.uint32))[lane] = c[row, column].view(np.uint32)
    source_c = f"{letter}[64:{63 + elements}]" if constant is None else str(constant)
    tail = ""
    if scales:
        words, text_tail, factors = scales
        vectors |= {"v60": words[0], "v61": words[1]}
        tail = f", v60, v61 {text_tail}"
        values = [v.reshape(size, k // 32, 32) * f[:, :, None] for v, f in zip(values, factors, strict=True)]
        values = [v.reshape(size, k) for v in values]
    outputs = tuple(f"{letter}{96 + n}" for n in range(elements))
    got = run_snippet(
        f"{text.split()[0]} {letter}[96:{95 + elements}], {registers[0]}, {registers[1]}, {source_c}{tail} "
        + " ".join(text.split()[1:]),
        vectors,
        outputs=outputs,
    )
    want = values[0] @ values[1].T + (c if constant is None else constant)
    result = np.zeros((size, size), c_kind)
    for (row, column), (element, lane) in where.items():
        result[row, column] = got[f"{letter}{96 + element}"][lane : lane + 1].view(c_kind)[0]
    return result, want, got


PLAIN = [
    ("v_mfma_f32_32x32x16_bf16", 32, 16, "bf16"),
    ("v_mfma_f32_16x16x32_bf16", 16, 32, "bf16"),
    ("v_mfma_f32_32x32x16_f16", 32, 16, "f16"),
    ("v_mfma_f32_16x16x32_f16", 16, 32, "f16"),
    ("v_mfma_f32_32x32x8_bf16", 32, 8, "bf16"),
    ("v_mfma_f32_16x16x16_bf16", 16, 16, "bf16"),
    ("v_mfma_f32_32x32x16_fp8_fp8", 32, 16, "fp8"),
    ("v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8"),
]


@pytest.mark.parametrize(("name", "size", "k", "kind"), PLAIN)
def test_plain(name, size, k, kind):
    got, want, _ = run_matrix(name, size, k, (kind, kind))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "k"),
    [
        ("v_mfma_i32_32x32x32_i8", 32, 32),
        ("v_mfma_i32_16x16x64_i8", 16, 64),
        ("v_mfma_i32_32x32x16_i8", 32, 16),
        ("v_mfma_i32_16x16x32_i8", 16, 32),
    ],
)
def test_int8_is_exact(name, size, k):
    got, want, _ = run_matrix(name, size, k, ("i8", "i8"), c_kind=np.int32)
    np.testing.assert_array_equal(got, want)


def test_int8_onto_a_float_pattern():
    # An accumulator that starts at 0x4B400000 reads back as the float 12582912 + S (NUMERICS.md, section 3).
    dense, codes = random_operand("i8", (32, 32))
    packed = pack(codes, 8, place_k(32, 32, 16, False))
    vectors = {f"v{16 + n}": packed[n] for n in range(4)} | {
        f"v{64 + n}": np.full(64, 0x4B400000, np.uint32) for n in range(16)
    }
    got = run_snippet(
        "v_mfma_i32_32x32x32_i8 v[64:79], v[16:19], v[16:19], v[64:79]",
        vectors,
        outputs=tuple(f"v{64 + n}" for n in range(16)),
    )
    want = dense @ dense.T
    for (row, column), (element, lane) in result_place(32).items():
        assert got[f"v{64 + element}"][lane : lane + 1].view(np.float32)[0] == 12582912 + want[row, column]


CODES = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4}
PAIRS = [("fp8", "fp8"), ("bf8", "fp8"), ("fp4", "fp4"), ("fp6", "fp6"), ("bf6", "fp8"), ("fp8", "fp4")]


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@pytest.mark.parametrize(("size", "k"), [(32, 64), (16, 128)])
def test_f8f6f4(size, k, kinds):
    runs = tuple(FORMATS[kind][1] == 8 for kind in kinds)
    text = f"v_mfma_f32_{size}x{size}x{k}_f8f6f4 cbsz:{CODES[kinds[0]]} blgp:{CODES[kinds[1]]}"
    got, want, _ = run_matrix(text, size, k, kinds, two_runs=runs)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("byte", [(0, 0), (1, 2), (3, 1), (2, 3)])
@pytest.mark.parametrize("kinds", [("fp8", "fp8"), ("fp4", "fp8")], ids="-".join)
@pytest.mark.parametrize(("size", "k"), [(32, 64), (16, 128)])
def test_scaled(size, k, kinds, byte):
    blocks = k // 32
    words = [RNG.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32) for _ in range(2)]
    factors = []
    for side in range(2):
        exponents = RNG.integers(-6, 7, (size, blocks))
        for row in range(size):
            for block in range(blocks):
                lane = size * block + row
                shift = 8 * byte[side]
                words[side][lane] = int(words[side][lane]) & ~(255 << shift) | int(exponents[row, block] + 127) << shift
        factors.append(2.0**exponents)
    low = ",".join(str(b & 1) for b in byte)
    high = ",".join(str(b >> 1) for b in byte)
    tail = f"op_sel:[{low},0] op_sel_hi:[{high},0]"
    runs = tuple(FORMATS[kind][1] == 8 for kind in kinds)
    text = f"v_mfma_scale_f32_{size}x{size}x{k}_f8f6f4 cbsz:{CODES[kinds[0]]} blgp:{CODES[kinds[1]]}"
    got, want, _ = run_matrix(text, size, k, kinds, two_runs=runs, scales=(words, tail, factors))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-3)


def test_constant_c_and_accvgprs():
    got, want, _ = run_matrix("v_mfma_f32_32x32x64_f8f6f4", 32, 64, ("fp8", "fp8"), two_runs=(True, True), constant=2.0)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    got, want, _ = run_matrix("v_mfma_f32_32x32x64_f8f6f4", 32, 64, ("fp8", "fp8"), two_runs=(True, True), acc=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_scale_255_is_nan_and_nan_stays():
    vectors = {f"v{16 + n}": np.full(64, 0x38383838, np.uint32) for n in range(8)}
    vectors |= {"v60": np.where(np.arange(64) == 3, 255, 127).astype(np.uint32)}
    got = run_snippet(
        "v_mfma_scale_f32_32x32x64_f8f6f4 v[96:111], v[16:23], v[16:23], 0, v60, v60 op_sel_hi:[0,0,0]",
        vectors,
        outputs=tuple(f"v{96 + n}" for n in range(16)),
    )
    for (row, column), (element, lane) in result_place(32).items():
        value = got[f"v{96 + element}"][lane : lane + 1].view(np.float32)[0]
        assert np.isnan(value) if 3 in (row, column) else value == 64


def test_sparse_row_sum():
    # Compressed ones with index pairs (0, 1): half of B's columns' sums; pairs (2, 3): the other half.
    dense, codes = random_operand("fp8", (16, 128))
    packed = pack(codes, 8, place_k(16, 128, 32, True))
    vectors = {f"v{32 + n}": packed[n] for n in range(8)} | {
        f"v{16 + n}": np.full(64, 0x38383838, np.uint32) for n in range(4)
    }
    vectors |= {"v20": np.full(64, 0x44444444, np.uint32), "v21": np.full(64, 0xEEEEEEEE, np.uint32)}
    vectors |= {f"v{64 + n}": np.zeros(64, np.uint32) for n in range(4)}
    got = run_snippet(
        "v_smfmac_f32_16x16x128_fp8_fp8 v[64:67], v[16:19], v[32:39], v20\ns_nop 15\n"
        "v_smfmac_f32_16x16x128_fp8_fp8 v[64:67], v[16:19], v[32:39], v21",
        vectors,
        outputs=("v64", "v65", "v66", "v67"),
    )
    for lane in range(64):
        np.testing.assert_allclose(got["v64"][lane : lane + 1].view(np.float32)[0], dense[lane % 16].sum(), atol=1e-4)
