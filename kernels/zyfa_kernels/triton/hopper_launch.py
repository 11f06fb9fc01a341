"""Launches the Hopper kernel: descriptors of Q, K and V for TMA, and the kernel found by its constants alone."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from zyfa_kernels.triton.launcher import launch_cached
from zyfa_kernels.triton.prefill_checks import require
from zyfa_kernels.triton.prefill_hopper import hopper_kernel
from zyfa_kernels.triton.transpose import TILE

_CODE = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}


def launch(call: Any, vt: torch.Tensor, bad: torch.Tensor, first: int, sequences: int, tiles: int) -> None:
    """Launches a checked call of `prefill` for sequences first … first + sequences; vt, bad: see `transpose`."""
    q, k, v = call.q, call.k, call.v
    hq, d, hkv, dv = q.shape[1], q.shape[2], v.shape[-2], v.shape[-1]
    plan = _plan(call.target, q.device.index, d, dv, call.block_size, call.int8)
    q_rows, k_rows = _rows(q.shape, q.stride(), "q"), _rows(k.shape, k.stride(), "k_cache")
    q1, q2, k1, k2, v1 = plan.boxes
    m_blocks = triton.cdiv(call.max_seqlen_q, 128)
    work = m_blocks * hq * sequences
    section = max(1, plan.section_bytes // (call.max_seqlen_k * (d + dv))) * (hq // hkv)
    strides_k, strides_v = call.strides(k), call.strides(v)
    lse = call.lse if call.lse is not None else call.q_scale
    arguments = (
        q1.of(q, q_rows),
        q2.of(q, q_rows),
        k1.of(k, k_rows),
        k2.of(k, k_rows),
        v1.of(vt, (vt.shape[0] // TILE, TILE, TILE)),
        call.q_scale,
        k,
        v,
        bad,
        call.k_scale,
        call.v_scale,
        call.out,
        call.out_scale if call.out_scale is not None else call.v_scale,
        lse,
        call.block_table if call.block_table is not None else call.lengths_k,
        call.cu_seqlens_q,
        call.lengths_k,
        first,
        sequences,
        call.table_stride,
        m_blocks,
        min(section, hq * sequences),
        tiles,
        call.window or 0,
        call.softmax_scale_log2,
        call.delta,
        lse.stride(0),
    )
    constants = (
        hq,
        hq // hkv,
        q_rows[3],
        q_rows[4],
        k_rows[5],
        k_rows[3],
        k_rows[4],
        *call.q_scale.stride(),
        *strides_k,
        *strides_v,
        *call.out.stride()[:2],
        int(call.k_scale.numel() > 1),
        int(call.v_scale.numel() > 1),
        64 if d == 192 else 0,
        call.block_size,
        call.causal,
        call.window is not None,
        call.lean,
        call.int8,
        call.offset,
        call.lse is not None,
        call.out_scale is not None,
        *plan.schedule,
    )
    typed = {6: torch.int8 if call.int8 else torch.uint8, 7: torch.uint8}
    key = (q.device.index, d, dv, call.out.dtype, call.out.data_ptr() % 16 == 0)
    launch_cached(hopper_kernel, (min(plan.multiprocessors, work),), arguments, constants, typed, key, num_warps=4)


class _Boxes:
    """Boxes that TMA copies out of a matrix: [rows, columns] of codes."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.block_shape = [rows, columns]
        self.dtype = dtype
        self.layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _CODE[dtype])

    def of(self, x: torch.Tensor, rows: tuple[int, ...]) -> TensorDescriptor:
        """Descriptor of x seen as `rows` says. Alignment and shape were checked with the call: no second check."""
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(
            base=_Base(x.data_ptr(), self.dtype),
            shape=[rows[0], rows[1]],
            strides=[rows[2], 1],
            block_shape=self.block_shape,
            layout=self.layout,
            padding="zero",
            round_f32_to_tf32=False,
        )
        return descriptor


class _Base:
    """What a descriptor asks of a tensor, which spares a view in the right dtype."""

    __slots__ = ("dtype", "pointer")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


class _Plan:
    """What does not change between calls of one model."""

    def __init__(self, target: Any, device: int, d: int, dv: int, block_size: int, int8: bool) -> None:
        options = target.hopper(d)
        code = torch.int8 if int8 else torch.float8_e4m3fn
        d1, d2 = (128, 64) if d == 192 else (d, d)
        box = min(block_size, TILE) or TILE
        shapes = ((64, d1), (64, d2), (box, d1), (box, d2))
        self.boxes = (*(_Boxes(*shape, code) for shape in shapes), _Boxes(dv, TILE, torch.float8_e4m3fn))
        self.section_bytes = options["section_bytes"]
        self.schedule = (
            options["stages"],
            bool(options["ordered"]),
            options["consumer_registers"],
            options["producer_registers"],
        )
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _plan(target: Any, device: int, d: int, dv: int, block_size: int, int8: bool) -> _Plan:
    return _Plan(target, device, d, dv, block_size, int8)


@lru_cache(maxsize=4096)
def _rows(shape: tuple[int, ...], stride: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Q or a cache as a matrix whose rows lie a token apart.

    Returns (rows, columns, pitch, rows to the next head, columns to the next head, rows to the next block).
    """
    block, token, head = ((0,) * (4 - len(stride)) + tuple(stride))[:-1]
    blocks, tokens, heads, d = (1,) * (4 - len(shape)) + tuple(shape)
    pitch = token if tokens > 1 else max(block, head, d)
    beside = heads == 1 or head < pitch
    row_h, col_h = (0, 0) if heads == 1 else (0, head) if beside else (head // pitch, 0)
    row_b = block // pitch if blocks > 1 else 0
    columns = (heads - 1) * col_h + d
    rows = (blocks - 1) * row_b + (heads - 1) * row_h + tokens
    require(
        (blocks == 1 or block % pitch == 0)
        and (beside or head % pitch == 0)
        and columns <= pitch
        and rows < 1 << 31,
        f"{name} has shape {list(shape)} and strides {tuple(stride)}; the Hopper kernel takes caches whose strides of "
        "blocks and heads are multiples of the tokens', or whose heads lie within a token, and fewer than 2^31 rows",
    )
    return rows, columns, pitch, row_h, col_h, row_b
