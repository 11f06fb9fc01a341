"""Scales of K and V per head from their own largest values, for K and V that go to no cache (MLA's prefill).

Two launches: each program finds the largest rotated K and the largest V of some tokens of a head, then one for each
head takes the largest of those. Nothing is added up, so the order does not matter to a bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import hadamard
from . import rotate_quantize_checks as checks
from .launcher import Launch, keep, on, prepared_for
from .quantize_device import device_of
from .rotate_quantize import ROWS, Turn
from .rotate_quantize_kernel import (
    E4M3_MAX,
    INF_BITS,
    INT8_MAX,
    SMALLEST_NORMAL,
    _largest_bits,
    _matrix,
    _over,
    _rotated,
    _rows,
)

__all__ = ["head_scales"]

PROGRAMS = 2  # of a multiprocessor
MOST_PREPARED = 256
_prepared: dict[tuple[Any, ...], _Prepared] = {}


def head_scales(
    k: torch.Tensor, v: torch.Tensor, *, rotation: str | None = "hadamard", qk_format: str = "fp8_e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(k_scale, v_scale), fp32 [H], with which `rotate_quantize_packed` clips nothing.

    k: [T, H, D], v: [T, H, Dv] as `rotate_quantize_write` takes them. The scale of a head is its largest magnitude, of
    K after the rotation, over the largest of the codes; of e4m3 (V, and K unless int8) the next power of two from
    there, at least 2^-126, so that a larger head beside changes no code but of values below 2^-13 of the largest.
    Tokens with a value of K, or of V, that is not finite do not count for it; without any other, and of zeros, the
    scale is 1. Raises ArgumentError.
    """
    checks.tensors(k=k, v=v)
    checks.input("k", k)
    checks.input("v", v)
    checks.expect("v", v, (*k.shape[:2], v.shape[2]), (k.dtype,), k.device)
    key = (rotation, qk_format, k.shape[1:], v.shape[2], k.stride(), v.stride(), k.dtype, k.device)
    prepared = prepared_for(key, _prepared)
    if prepared is None:
        prepared = _Prepared(k, v, rotation, qk_format)
        keep(key, prepared, _prepared, MOST_PREPARED)
    return prepared.run(k, v)


class _Prepared:
    """Both kernels for tensors of a layout, whatever their tokens."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, rotation: str | None, qk_format: str) -> None:
        blocks, kind = checks.rotation(k, rotation, None)
        checks.form(qk_format)
        device, v_dim = device_of(k.device), v.shape[2]
        turn = Turn(k, blocks, kind, rotation, device.shared)
        self.tables, self.heads = turn.tables, k.shape[1]
        self.most = max(1, device.processors * PROGRAMS // self.heads)
        constants = (
            *k.stride(), *v.stride(), *turn.constants, v_dim, hadamard.padded(v_dim), kind, ROWS, turn.tile.stages,
        )  # fmt: skip
        self.maxima = Launch(maxima_kernel, constants, {}, (k.device, k.dtype), num_warps=4)
        constants = (hadamard.padded(self.most), qk_format == "int8")
        self.scales = Launch(scales_kernel, constants, {}, (k.device,), num_warps=1)

    def run(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads = k.shape[0], self.heads
        programs = max(1, min(-(-tokens // ROWS), self.most))
        largest = torch.empty(2, heads, programs, dtype=torch.int32, device=k.device)
        scale = torch.empty(2, heads, dtype=torch.float32, device=k.device)
        with on(k.device):
            aligned = (k.data_ptr() | v.data_ptr()) % 16 == 0
            self.maxima((programs, heads, 1), (k, v, *self.tables, largest, tokens), aligned)
            self.scales((heads, 1, 1), (largest, scale, programs))
        return scale[0], scale[1]


@triton.jit
def _largest(
    x, m0, m1, tokens, x_token: tl.constexpr, x_channel: tl.constexpr, D0: tl.constexpr, W0: tl.constexpr,
    N0: tl.constexpr, D1: tl.constexpr, W1: tl.constexpr, N1: tl.constexpr, ROTATE: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude in this program's tokens of a head, those left out that are not finite."""
    largest = tl.full((ROWS,), 0, tl.int32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0), num_stages=STAGES):
        live = tl.arange(0, ROWS) < tokens - tile * ROWS
        base, start = _rows(x, tile, x_token, 0, 1, ROWS)
        bits = _largest_bits(_rotated(base, start, live, x_channel, m0, 0, D0, W0, N0, ROTATE, ROWS), N0, ROTATE)
        if D1:
            second = _rotated(base, start, live, x_channel, m1, D0, D1, W1, N1, ROTATE, ROWS)
            bits = tl.maximum(bits, _largest_bits(second, N1, ROTATE))
        largest = tl.maximum(largest, tl.where(bits < INF_BITS, bits, 0))
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["tokens"])
def maxima_kernel(
    k, v, table0, table1, largest, tokens, k_token: tl.constexpr, k_head: tl.constexpr, k_channel: tl.constexpr,
    v_token: tl.constexpr, v_head: tl.constexpr, v_channel: tl.constexpr, D0: tl.constexpr, W0: tl.constexpr,
    N0: tl.constexpr, D1: tl.constexpr, W1: tl.constexpr, N1: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr,
    ROTATE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid [programs, H]; largest: int32 [2, H, programs]. The constants are those of `rotate_quantize`."""
    program, head = tl.program_id(0), tl.program_id(1)
    programs, heads = tl.num_programs(0), tl.num_programs(1)
    m0 = _matrix(table0, ROTATE, W0)
    m1 = 0.0
    if D1:
        m1 = _matrix(table1, ROTATE, W1)
    k += head.to(tl.int64) * k_head
    found = _largest(k, m0, m1, tokens, k_token, k_channel, D0, W0, N0, D1, W1, N1, ROTATE, ROWS, STAGES)
    tl.store(largest + head * programs + program, found)
    v += head.to(tl.int64) * v_head
    found = _largest(v, 0.0, 0.0, tokens, v_token, v_channel, DV, WV, 1.0, 0, 1, 1.0, "none", ROWS, STAGES)
    tl.store(largest + (heads + head) * programs + program, found)


@triton.jit(do_not_specialize=["programs"])
def scales_kernel(largest, scale, programs, PROGRAMS: tl.constexpr, INT8: tl.constexpr):
    """Grid [H]; scale: fp32 [2, H]."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    tl.store(scale + head, _scale(largest + head * programs, programs, PROGRAMS, INT8))
    tl.store(scale + heads + head, _scale(largest + (heads + head) * programs, programs, PROGRAMS, False))


@triton.jit
def _scale(largest, programs, PROGRAMS: tl.constexpr, INT8: tl.constexpr):
    at = tl.arange(0, PROGRAMS)
    bits = tl.max(tl.load(largest + at, mask=at < programs, other=0), 0)
    scale = tl.maximum(_over(bits.to(tl.float32, bitcast=True), INT8_MAX if INT8 else E4M3_MAX), SMALLEST_NORMAL)
    if not INT8:  # a significand that is not 1 carries into the exponent
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(bits == 0, 1.0, scale)
