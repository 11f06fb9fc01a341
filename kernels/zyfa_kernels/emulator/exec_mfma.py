"""Matrix instructions. Products are summed in fp64 and rounded to fp32 once; int8 ones are exact.

Layouts (L = M or N, the number of rows or columns; a lane holds row or column `lane % L`):
  A and B   group g = lane / L holds k = g·n … g·n + n - 1 for its n elements; 8-bit operands of the f8f6f4
            instructions instead hold two runs of 16: k = 16·g … and, half of K further, the same.
  C and D   32x32: element i of a lane is row 8·(i/4) + 4·(lane/32) + i%4; 16x16: row 4·(lane/16) + i.
"""

from __future__ import annotations

import re

import numpy as np

from .decode import VGPR, Instruction, Operand
from .formats import MX_BITS, MX_TABLES, bf16_to_f32, unpack_codes
from .operands import BUILDERS, constant_bits, fetch_u32

_NAME = re.compile(
    r"v_mfma_(scale_)?(f32|i32)_(\d+)x(\d+)x(\d+)_?(f8f6f4|bf16|f16|i8|f32|(?:fp8|bf8)_(?:fp8|bf8))(_1k)?$"
)


def matrix_shape(inst: Instruction) -> tuple[int, int, int]:
    """(M, N, K) of a matrix instruction."""
    return tuple(int(x) for x in re.search(r"_(\d+)x(\d+)x(\d+)", inst.mnemonic).groups())


def operand_k(lanes_per_row: int, k: int, n: int, two_runs: bool) -> np.ndarray:
    """k index of each element of each lane group: [groups, n]."""
    groups = 64 // lanes_per_row
    if two_runs:
        run = np.arange(16)
        return np.stack([np.concatenate([16 * g + run, k // 2 + 16 * g + run]) for g in range(groups)])
    return np.arange(groups)[:, None] * n + np.arange(n)


def gather(words: np.ndarray, rows: int, k: int, decode, two_runs: bool) -> np.ndarray:
    """Operand registers uint32 [n, W, 64] to a matrix [W, rows, k] of fp64."""
    waves = words.shape[1]
    lane_words = np.ascontiguousarray(np.moveaxis(words, 0, -1))  # [W, 64, n]
    values = decode(lane_words).reshape(waves, 64 // rows, rows, -1)
    n = values.shape[-1]
    if two_runs:
        values = values.reshape(waves, 64 // rows, rows, 2, 16).transpose(0, 2, 3, 1, 4)
    else:
        values = values.transpose(0, 2, 1, 3)
    return np.ascontiguousarray(values).reshape(waves, rows, n * (64 // rows))


def accumulator_to_matrix(c: np.ndarray, m: int) -> np.ndarray:
    """C registers [m·m/64, W, 64] to [W, row, column]."""
    waves = c.shape[1]
    if m == 32:
        return c.reshape(4, 4, waves, 2, 32).transpose(2, 0, 3, 1, 4).reshape(waves, 32, 32)
    return c.reshape(4, waves, 4, 16).transpose(1, 2, 0, 3).reshape(waves, 16, 16)


def matrix_to_accumulator(d: np.ndarray, m: int) -> np.ndarray:
    waves = d.shape[0]
    if m == 32:
        return d.reshape(waves, 4, 2, 4, 32).transpose(1, 3, 0, 2, 4).reshape(16, waves, 64)
    return d.reshape(waves, 4, 4, 16).transpose(2, 0, 1, 3).reshape(4, waves, 64)


def _decoder(kind: str, selector: int):
    """Function from lane words uint32 [W, 64, n] to fp64 elements, and whether it uses the two-run layout."""
    if kind == "f8f6f4":
        table, bits = MX_TABLES[selector], MX_BITS[selector]
        return (lambda w: table[unpack_codes(w, bits)]), bits == 8
    if kind in ("fp8", "bf8"):
        table = MX_TABLES[0 if kind == "fp8" else 1]
        return (lambda w: table[w.view(np.uint8)]), False
    if kind == "bf16":
        return (lambda w: bf16_to_f32(w.view(np.uint16)).astype(np.float64)), False
    if kind == "f16":
        return (lambda w: w.view(np.float16).astype(np.float64)), False
    if kind == "i8":
        return (lambda w: w.view(np.int8).astype(np.float64)), False
    return (lambda w: w.view(np.float32).astype(np.float64)), False


def _scale_factors(operand: Operand, byte: int, rows: int):
    """Function giving 2^(E8M0 - 127) as [W, rows, blocks]: block b of a row lies in lane rows·b + row."""
    fetch = fetch_u32(operand) if operand.reg >= 0 else None
    constant = None if fetch else np.uint32(constant_bits(operand.value))
    groups = 64 // rows

    def factors(g):
        word = constant if fetch is None else fetch(g)
        code = np.broadcast_to(word >> np.uint32(8 * byte) & np.uint32(0xFF), (g.size, 64)).astype(np.int64)
        scale = np.where(code == 255, np.nan, np.ldexp(1.0, code - 127))
        return scale.reshape(g.size, groups, rows).transpose(0, 2, 1)

    return factors


def _constant_c(operand: Operand, kind: str):
    value = operand.value
    bits = constant_bits(value) if isinstance(value, float) or operand.literal else value & 0xFFFFFFFF
    scalar = np.array(bits, np.uint32).view(np.float32 if kind == "f32" else np.int32)[()]
    return scalar


def build_mfma(inst: Instruction):
    match = _NAME.match(inst.mnemonic)
    if match is None:
        raise NotImplementedError("this matrix shape")
    out_kind, m, n, k, kind = match[2], int(match[3]), int(match[4]), int(match[5]), match[6]
    if m != n or m not in (16, 32):
        raise NotImplementedError("this matrix shape")
    mixed = kind == "f8f6f4"
    selectors = (inst.mods.get("cbsz", 0), inst.mods.get("blgp", 0)) if mixed else (0, 0)
    kinds = kind.split("_") if "_" in kind else (kind, kind)
    if not mixed and (inst.mods.get("cbsz") or inst.mods.get("blgp") or inst.mods.get("abid")):
        raise NotImplementedError("broadcast or negation modifiers of an MFMA")
    (decode_a, runs_a), (decode_b, runs_b) = (_decoder(kinds[i], selectors[i]) for i in (0, 1))
    a, b, c, d = (inst.operands[role] for role in ("src0", "src1", "src2", "vdst"))
    rows_a, rows_b, row_d = a.reg - VGPR, b.reg - VGPR, d.reg - VGPR
    view = np.float32 if out_kind == "f32" else np.int32
    constant = _constant_c(c, out_kind) if c.reg < 0 else None
    row_c = c.reg - VGPR
    scales = None
    if match[1]:
        low, high = inst.mods["opsel"], inst.mods["opsel_hi"]
        scales = [_scale_factors(inst.operands[f"scale{i}"], (low >> i & 1) | (high >> i & 1) << 1, m) for i in (0, 1)]
    elements, blocks = m * n // 64, k // 32

    def run(g):
        left = gather(g.V[rows_a : rows_a + a.count], m, k, decode_a, runs_a)
        right = gather(g.V[rows_b : rows_b + b.count], n, k, decode_b, runs_b)
        if scales:
            left = (left.reshape(g.size, m, blocks, 32) * scales[0](g)[..., None]).reshape(g.size, m, k)
            right = (right.reshape(g.size, n, blocks, 32) * scales[1](g)[..., None]).reshape(g.size, n, k)
        with np.errstate(invalid="ignore", over="ignore"):
            product = np.matmul(left, right.transpose(0, 2, 1))
            if constant is not None:
                total = product + constant
            else:
                total = product + accumulator_to_matrix(g.V[row_c : row_c + elements].view(view), m)
            if view is np.int32:
                result = total.astype(np.int64).astype(np.int32)
            else:
                result = total.astype(np.float32)
        g.V[row_d : row_d + elements] = matrix_to_accumulator(result, m).view(np.uint32)
        g.define_all(row_d, elements)

    return run


_SHAPES = (
    "32x32x64_f8f6f4",
    "16x16x128_f8f6f4",
    "32x32x16_bf16",
    "16x16x32_bf16",
    "32x32x16_f16",
    "16x16x32_f16",
    "32x32x8_bf16",
    "16x16x16_bf16",
    "32x32x8_f16",
    "16x16x16_f16",
    "32x32x2_f32",
    "16x16x4_f32",
    *[f"{s}_{x}_{y}" for s in ("32x32x16", "16x16x32") for x in ("fp8", "bf8") for y in ("fp8", "bf8")],
)
for _shape in _SHAPES:
    BUILDERS[f"v_mfma_f32_{_shape}"] = build_mfma
for _shape in ("32x32x64_f8f6f4", "16x16x128_f8f6f4"):
    BUILDERS[f"v_mfma_scale_f32_{_shape}"] = build_mfma
for _shape in ("32x32x32_i8", "16x16x64_i8", "32x32x16_i8", "16x16x32_i8"):
    BUILDERS[f"v_mfma_i32_{_shape}"] = build_mfma


def expand_sparse(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """4:2 structured A: compressed [..., 16] and index words [...] (2 bits an element) to dense [..., 32].

    Elements 2j and 2j + 1 belong to the four dense places 4j … 4j + 3; their index says to which.
    """
    place = (index[..., None] >> (2 * np.arange(16, dtype=np.uint32)) & np.uint32(3)).astype(np.int64)
    place += np.arange(16) // 2 * 4
    dense = np.zeros((*values.shape[:-1], 32))
    np.put_along_axis(dense, place, values, axis=-1)
    return dense


def build_smfmac(inst: Instruction):
    """Sparse fp8 products. A lane's 16 compressed elements of A cover 32 consecutive k; B has the two-run layout.

    That pairing is inferred: it is the one under which AITER's v4 kernels sum the rows of P as they must.
    """
    m, n, k = matrix_shape(inst)
    kinds = inst.mnemonic.split("_")[-2:]
    tables = [MX_TABLES[0 if kind == "fp8" else 1] for kind in kinds]
    a, b, index, d = (inst.operands[role].reg - VGPR for role in ("src0", "src1", "src2", "vdst"))
    if inst.mods.get("cbsz") or inst.mods.get("abid"):
        raise NotImplementedError("index set selection of an SMFMAC")
    groups, elements = 64 // m, m * n // 64

    def run(g):
        words = np.ascontiguousarray(np.moveaxis(g.V[a : a + 4], 0, -1))
        dense = expand_sparse(tables[0][words.view(np.uint8)], g.V[index])
        left = dense.reshape(g.size, groups, m, 32).transpose(0, 2, 1, 3).reshape(g.size, m, k)
        right = gather(g.V[b : b + 8], n, k, lambda w: tables[1][w.view(np.uint8)], True)
        old = accumulator_to_matrix(g.Vf[d : d + elements], m)
        total = np.matmul(left, right.transpose(0, 2, 1)) + old
        g.V[d : d + elements] = matrix_to_accumulator(total.astype(np.float32), m).view(np.uint32)
        g.define_all(d, elements)

    return run


for _shape in ("16x16x128", "32x32x64"):
    for _x in ("fp8", "bf8"):
        for _y in ("fp8", "bf8"):
            BUILDERS[f"v_smfmac_f32_{_shape}_{_x}_{_y}"] = build_smfmac
