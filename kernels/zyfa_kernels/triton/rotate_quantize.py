"""Rotation and quantisation of Q, and of K and V into a paged cache, each in one pass and one launch.

The numbers are those of `zyfa_backend.quantization` (e4m3fn or int8 codes; see there for NaN and infinities): without
a rotation bit for bit; with method "butterfly" bit for bit as well; with "dot" the fp32 sums of a rotation come in the
matrix unit's order and the factors follow as one, so that a value within 2^-20 of the row's norm of a tie may take the
neighbouring code, and a scale of Q differ in its last bits. The bits of a row depend on that row alone. Of a NaN code
of e4m3 the sign is not defined. K and V scales lie in [2^-126, 2^125]; they are not checked, which would wait for the
GPU. The first call for a layout of tensors compiles and makes tables: not while a graph is captured.

Codes are OCP e4m3fn on every GPU, on AMD's gfx942 too, whose own matrix units read e4m3fnuz.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from . import hadamard
from . import rotate_quantize_checks as checks
from .launcher import keep, on, prepared_for
from .quantize_device import device_of
from .rotate_quantize_checks import ArgumentError, Tensors
from .rotate_quantize_kernel import rotate_quantize

__all__ = [
    "ArgumentError", "Tile", "rotate_quantize_packed", "rotate_quantize_q", "rotate_quantize_qkv",
    "rotate_quantize_write",
]  # fmt: skip

ROWS = 64
MOST_PLANS = 1024
SYSTEM_SHARED = 1024  # bytes that CUDA takes of each program's shared memory


@dataclass(frozen=True)
class Tile:
    """How the work is cut.

    rows: heads of tokens that a program handles at a time; warps: of a program; stages: tiles in flight; programs: the
    most that share a multiprocessor; registers: the most of a thread on CUDA, None for the compiler's choice.
    """

    rows: int = ROWS
    warps: int = 4
    stages: int = 4
    programs: int = 2
    registers: int | None = None


def rotate_quantize_q(
    q: torch.Tensor,
    *,
    rotation: str | None = "hadamard",
    qk_format: str = "fp8_e4m3",
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    method: str | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates Q and quantises it with a dynamic scale per token and head.

    q: [T, Hq, D] bf16, fp16 or fp32, after RoPE, any strides; D in 64, 96, 128, 192 (128 and 64 on the diagonal), or
    any up to 256 without a rotation. rotation: "hadamard", "signed" or "none" (None means the same).
    out: codes [T, Hq, D] to write, any strides, uint8 or float8_e4m3fn for "fp8_e4m3", int8 for "int8"; a new tensor
    (uint8 or int8) without it. scale: fp32 [T, Hq] likewise. method, tile: None for what measures fastest.
    Returns (codes, scale), q = codes · scale. Raises ArgumentError.
    """
    checks.tensors(q=q)
    checks.optional(out=out, scale=scale)
    checks.input("q", q)
    out, scale = _outputs(q, qk_format, out, scale)
    _launch((q, _bytes(out), scale, *[None] * 8), rotation, qk_format, method, tile)
    return out, scale


def rotate_quantize_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    rotation: str | None = "hadamard",
    qk_format: str = "fp8_e4m3",
    saturated: torch.Tensor | None = None,
    method: str | None = None,
    tile: Tile | None = None,
) -> None:
    """Rotates K, quantises K (to qk_format) and V (to e4m3) with static scales and writes both to a paged cache.

    k: [T, Hkv, D], v: [T, Hkv, Dv], bf16, fp16 or fp32, any strides; D as in `rotate_quantize_q`, Dv up to 256.
    k_cache, v_cache: [num_blocks, block_size, Hkv, D or Dv] of one byte an element (uint8, int8, float8_e4m3fn), any
    strides. slot_mapping: int32 or int64, of at most T tokens, block · block_size + place; a negative slot is skipped.
    Slots are not checked against the cache. k_scale, v_scale: fp32 [Hkv] or [1], on the GPU.
    saturated: int64 [2], to which the numbers of values of K and V that were clipped are added; not counted without it.
    Raises ArgumentError.
    """
    checks.tensors(
        k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale
    )
    checks.optional(saturated=saturated)
    checks.input("k", k)
    checks.input("v", v)
    if v.shape[:2] != k.shape[:2] or v.dtype != k.dtype or v.device != k.device:
        raise ArgumentError(
            f"v is {list(v.shape)} {v.dtype} on {v.device}, k {list(k.shape)} {k.dtype} on {k.device}; "
            f"expected the same tokens, heads, dtype and device"
        )
    cache = (_bytes(k_cache), _bytes(v_cache), slot_mapping, k_scale, v_scale, saturated)
    _launch((None, None, None, k, v, *cache), rotation, qk_format, method, tile)


def rotate_quantize_qkv(
    qkv: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    v_head_dim: int | None = None,
    rotation: str | None = "hadamard",
    qk_format: str = "fp8_e4m3",
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    saturated: torch.Tensor | None = None,
    method: str | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotate_quantize_q` and `rotate_quantize_write` in one launch, on the output of a fused QKV projection.

    qkv: [T, Hq·D + Hkv·D + Hkv·Dv], Q before K before V, after RoPE; any stride between tokens. Dv is D unless given.
    Everything else as in the two functions. Returns (codes [T, Hq, D], scale [T, Hq]). Raises ArgumentError.
    """
    v_dim = head_dim if v_head_dim is None else v_head_dim
    counts = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": v_dim}
    for name, value in counts.items():
        if not isinstance(value, Integral) or value < 1:
            raise ArgumentError(f"{name}={value!r} is not accepted; an integer, at least 1")
    checks.tensors(qkv=qkv)
    widths = [num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_dim]
    if qkv.dim() != 2 or qkv.shape[1] != sum(widths):
        raise ArgumentError(f"qkv is {list(qkv.shape)}; expected [T, {sum(widths)}], {' + '.join(map(str, widths))}")
    checks.tensors(k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale)
    checks.optional(out=out, scale=scale, saturated=saturated)
    dims = (head_dim, head_dim, v_dim)
    q, k, v = (part.unflatten(1, (-1, dim)) for part, dim in zip(qkv.split(widths, 1), dims, strict=True))
    for name, part in (("q", q), ("k", k), ("v", v)):
        checks.input(name, part)
    out, scale = _outputs(q, qk_format, out, scale)
    cache = (_bytes(k_cache), _bytes(v_cache), slot_mapping, k_scale, v_scale, saturated)
    _launch((q, _bytes(out), scale, k, v, *cache), rotation, qk_format, method, tile)
    return out, scale


def rotate_quantize_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    rotation: str | None = "hadamard",
    qk_format: str = "fp8_e4m3",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rotate_quantize_q` and `rotate_quantize_write` in one launch, where K and V go to no cache.

    q: [T, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv], of one dtype. Everything else as in the two functions.
    Returns (codes of q, scale [T, Hq], codes of k, codes of v), the codes uint8, of int8 Q and K int8. Raises
    ArgumentError.
    """
    checks.tensors(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.input(name, x)
    checks.expect("k", k, (k.shape[0], k.shape[1], q.shape[2]), (q.dtype,), q.device)
    checks.expect("v", v, (*k.shape[:2], v.shape[2]), (q.dtype,), q.device)
    out, scale = _outputs(q, qk_format, None, None)
    k_codes = torch.empty(k.shape, dtype=out.dtype, device=k.device)
    v_codes = torch.empty(v.shape, dtype=torch.uint8, device=k.device)
    cache = (_bytes(k_codes), v_codes, None, k_scale, v_scale, None)
    _launch((q, _bytes(out), scale, k, v, *cache), rotation, qk_format, None, None)
    return out, scale, k_codes, v_codes


@dataclass(frozen=True)
class _Plan:
    """A checked call: what is passed to the kernel after the tensors and the numbers of tokens, and how it runs."""

    tables: tuple[torch.Tensor, torch.Tensor]
    after: tuple[Any, ...]
    q_heads: int
    kv_heads: int
    tile: Tile
    processors: int
    compiled: list[Any]


_plans: dict[tuple[Any, ...], _Plan] = {}
# Which of `_launch`'s tensors have a row for each token: all but caches, scales and counters.
_OF_TOKENS = (True, True, True, True, True, False, False, True, False, False, False)


def _launch(tensors: Tensors, *choices: Any) -> None:
    """Checks and launches. tensors: q, out, q_scale, k, v, k_cache, v_cache, slots, k_scale, v_scale, saturated.

    Triton binds and specialises arguments anew each time, which takes longer than a short kernel: what doesn't depend
    on the number of tokens is done once for each layout of the tensors.
    """
    q, _, _, k, _, _, _, slots, *_ = tensors
    device = (k if q is None else q).device  # type: ignore[union-attr]
    key = (choices, *map(_layout, tensors, _OF_TOKENS))
    plan = prepared_for(key, _plans)
    if plan is None:
        plan = _plan(tensors, *choices)
        keep(key, plan, _plans, MOST_PLANS)
    else:
        checks.tokens(tensors)
    q_tokens = 0 if q is None else q.shape[0]
    kv_tokens = 0 if k is None else (k if slots is None else slots).shape[0]
    rows = plan.tile.rows
    tiles = -(-q_tokens * plan.q_heads // rows) + 2 * -(-kv_tokens * plan.kv_heads // rows)
    if tiles == 0:
        return
    grid = (min(tiles, plan.processors * plan.tile.programs), 1, 1)
    pointers = (plan.tables[0] if t is None else t for t in tensors)  # the kernel doesn't touch what is left out
    arguments = (*pointers, *plan.tables, q_tokens, kv_tokens, *plan.after)
    with on(device):
        if plan.compiled:
            plan.compiled[0][grid](*arguments)
            return
        options = {} if plan.tile.registers is None else {"maxnreg": plan.tile.registers}
        made = rotate_quantize[grid](*arguments, num_warps=plan.tile.warps, **options)
        if made is not None:  # the interpreter compiles nothing
            plan.compiled.append(made)


def _layout(tensor: torch.Tensor | None, of_tokens: bool) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    shape = tensor.shape[1:] if of_tokens or tensor.dim() == 3 else tensor.shape  # packed codes are of tokens, too
    return shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


def _plan(
    tensors: Tensors, rotation: str | None, qk_format: str, method: str | None, tile: Tile | None
) -> _Plan:
    """Checks everything. Raises ArgumentError."""
    q, out, q_scale, k, v, k_cache, v_cache, slots, k_scale, v_scale, saturated = tensors
    x = k if q is None else q
    assert x is not None
    v_dim, kv_heads = x.shape[2], 0
    blocks, kind = checks.rotation(x, rotation, method)
    checks.form(qk_format)
    if tile is not None and not isinstance(tile, Tile):
        raise ArgumentError(f"tile={tile!r} is not accepted; a Tile or None")
    if k is not None:
        assert v is not None and k_cache is not None and v_cache is not None
        assert k_scale is not None and v_scale is not None
        kv_heads, v_dim = k.shape[1], v.shape[2]
        if slots is not None:
            checks.cache("k_cache", k_cache, k, k_cache)
            checks.cache("v_cache", v_cache, v, k_cache)
            checks.slots(slots, k)
        checks.scale("k_scale", k_scale, k)
        checks.scale("v_scale", v_scale, k)
        checks.saturated(saturated, x.device)
    checks.tokens(tensors)
    stats = device_of(x.device)
    turn = Turn(x, blocks, kind, rotation, stats.shared)
    tile = tile or turn.tile
    after = (
        *_strides(q, 3), *_strides(out, 3), *_strides(q_scale, 2), *_strides(k, 3), *_strides(v, 3),
        *_strides(k_cache, 4), *_strides(v_cache, 4), *_scale_stride(k_scale), *_scale_stride(v_scale),
        # Q_HEADS, KV_HEADS, D0, W0, N0, D1, W1, N1, DV, WV, ROTATE, INT8, NATIVE, SATURATES, COUNT, BLOCK, ROWS, STAGES
        0 if q is None else q.shape[1], kv_heads, *turn.constants, v_dim, hadamard.padded(v_dim), kind,
        qk_format == "int8", stats.native_e4m3, stats.saturates, saturated is not None,
        0 if slots is None or k_cache is None else k_cache.shape[1], tile.rows, tile.stages,
    )  # fmt: skip
    return _Plan(turn.tables, after, 0 if q is None else q.shape[1], kv_heads, tile, stats.processors, [])


class Turn:
    """How the kernels rotate rows of x [T, H, D]; blocks, kind: what `checks.rotation` gives.

    tables: of the first and the last block; constants: D0, W0, N0, D1, W1, N1; tile: the default.
    """

    def __init__(
        self, x: torch.Tensor, blocks: tuple[int, ...], kind: str, rotation: str | None, shared: int
    ) -> None:
        tables = hadamard.tables(x.shape[2], kind, rotation or "none", x.dtype, x.device)
        self.tables = (tables[0], tables[-1])
        widths = [hadamard.padded(order) for order in blocks]
        norms = [1 / math.sqrt(order) if kind != "none" else 1.0 for order in blocks]
        parts = [*zip(blocks, widths, norms, strict=True), (0, 1, 1.0)]
        self.constants = (*parts[0], *parts[1])
        matrix = sum(width**2 for width in widths) if kind == "dot" else 0
        self.tile = default_tile(matrix, sum(widths), x.element_size(), shared)


def default_tile(matrix: int, row: int, size: int, shared: int) -> Tile:
    """Four stages, the fastest on an H200, or as many as let two programs share a multiprocessor.

    matrix, row: elements of the rotation's matrices and of a row; size: bytes of an element; shared: bytes that one
    program may have, which is about what a multiprocessor has.
    """

    def used(stages: int) -> int:
        codes = ROWS * row  # on their way from the matrix unit's layout to rows
        return (matrix + stages * ROWS * row) * size + codes + SYSTEM_SHARED

    return Tile(stages=next((n for n in (4, 3, 2) if 2 * used(n) <= shared), 2 if used(2) <= shared else 1))


def _strides(tensor: torch.Tensor | None, count: int) -> tuple[int, ...]:
    """The last `count` strides; 0 in front of what a packed cache has, which is no blocks, and of nothing."""
    strides = () if tensor is None else tensor.stride()
    return (0,) * (count - len(strides)) + strides


def _scale_stride(scale: torch.Tensor | None) -> tuple[int]:
    return (0,) if scale is None or scale.numel() == 1 else (scale.stride(0),)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """Codes as uint8; what is none stays as it is, for the checks to refuse."""
    return codes.view(torch.uint8) if codes.dtype in (torch.int8, torch.float8_e4m3fn) else codes


def _outputs(
    q: torch.Tensor, qk_format: str, out: torch.Tensor | None, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.form(qk_format)
    accepted = (torch.int8,) if qk_format == "int8" else (torch.uint8, torch.float8_e4m3fn)
    if out is None:
        out = torch.empty(q.shape, dtype=accepted[0], device=q.device)
    if scale is None:
        scale = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    checks.expect("out", out, q.shape, accepted, q.device)
    checks.expect("scale", scale, q.shape[:2], (torch.float32,), q.device)
    return out, scale
