"""Launches the Hopper kernel: its constants, and the descriptors of Q, K and V for TMA."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from zyfa_kernels.triton.launcher import Launch
from zyfa_kernels.triton.prefill_checks import require
from zyfa_kernels.triton.prefill_hopper import hopper_kernel
from zyfa_kernels.triton.transpose import TILE

_CODE = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}


class HopperAttention:
    """Launches the kernel for a prepared call (see `prefill_call.Call`)."""

    def __init__(self, call: Any, q: Any, k: Any, q_scale: Any, out: Any, lse: Any) -> None:
        options = call.target.hopper(call.d)
        d, dv, group = call.d, call.dv, call.hq // call.hkv
        code = torch.int8 if call.int8 else torch.float8_e4m3fn
        q_rows, k_rows = _rows(q.shape, q.stride(), "q"), _rows(k.shape, k.stride(), "k_cache")
        d1, d2 = (128, 64) if d == 192 else (d, d)
        box = min(call.block_size, TILE) or TILE
        self.q1, self.q2 = _Boxes(64, d1, code, q_rows), _Boxes(64, d2, code, q_rows)
        self.k1, self.k2 = _Boxes(box, d1, code, k_rows), _Boxes(box, d2, code, k_rows)
        self.vt = _Boxes(dv, TILE, torch.float8_e4m3fn, (call.step * call.per_sequence // TILE, TILE, TILE))
        self.m_blocks = triton.cdiv(call.max_seqlen_q, 128)
        self.multiprocessors = torch.cuda.get_device_properties(call.device).multi_processor_count
        # Enough heads to balance a section over the CTAs, even if their K and V don't stay in L2.
        self.section = max(1, options["section_bytes"] // (call.max_seqlen_k * (d + dv))) * group
        self.section = max(self.section, triton.cdiv(4 * self.multiprocessors, self.m_blocks))
        self.lse_stride = lse.stride(0) if lse is not None else 0
        self.call = call
        constants = (
            call.hq,
            group,
            q_rows[3],
            q_rows[4],
            k_rows[5],
            k_rows[3],
            k_rows[4],
            *q_scale.stride(),
            *call.k_strides,
            *call.v_strides,
            *out.stride()[:2],
            *call.scale_strides,
            64 if d == 192 else 0,
            call.block_size,
            call.causal,
            call.window is not None,
            call.lean,
            call.int8,
            call.offset,
            call.with_lse,
            call.fp8_out,
            options["stages"],
            options["consumer_registers"],
            options["producer_registers"],
        )
        typed = {6: torch.int8 if call.int8 else torch.uint8, 7: torch.uint8}
        self.launch = Launch(hopper_kernel, constants, typed, (call.device, d, dv, out.dtype), num_warps=4)

    def __call__(
        self, tensors: tuple[Any, ...], vt: torch.Tensor, bad: torch.Tensor, first: int, sequences: int
    ) -> None:
        """Sequences first … first + sequences; vt, bad: see `transpose`."""
        q, q_scale, k, v, k_scale, v_scale, out, out_scale, lse, block_table, cu_seqlens_q, lengths_k = tensors
        call = self.call
        combinations = call.hq * sequences
        arguments = (
            self.q1.of(q),
            self.q2.of(q),
            self.k1.of(k),
            self.k2.of(k),
            self.vt.of(vt),
            q_scale,
            k,
            v,
            bad,
            k_scale,
            v_scale,
            out,
            out_scale if out_scale is not None else v_scale,
            lse if lse is not None else q_scale,
            block_table if block_table is not None else lengths_k,
            cu_seqlens_q,
            lengths_k,
            first,
            sequences,
            call.table_stride,
            self.m_blocks,
            min(self.section, combinations),
            call.tiles,
            call.window or 0,
            call.softmax_scale_log2,
            call.delta,
            self.lse_stride,
        )
        grid = (min(self.multiprocessors, self.m_blocks * combinations), 1, 1)
        self.launch(grid, arguments, out.data_ptr() % 16 == 0)


class _Boxes:
    """Boxes that TMA copies out of a matrix: [rows, columns] of codes; matrix: its rows, columns and pitch."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, matrix: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.fields = {
            "shape": list(matrix[:2]),
            "strides": [matrix[2], 1],
            "block_shape": [rows, columns],
            "layout": gl.NVMMASharedLayout.get_default_for([rows, columns], _CODE[dtype]),
            "padding": "zero",
            "round_f32_to_tf32": False,
        }

    def of(self, x: torch.Tensor) -> TensorDescriptor:
        """Descriptor with x's data. Alignment and shape were checked with the call: not a second time here."""
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(self.fields, base=_Base(x.data_ptr(), self.dtype))
        return descriptor


class _Base:
    """What a descriptor asks of a tensor, which spares a view in the right dtype."""

    __slots__ = ("dtype", "pointer")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


def _rows(shape: tuple[int, ...], stride: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Q or a cache as a matrix whose rows lie a token apart.

    Returns (rows, columns, pitch, rows to the next head, columns to the next head, rows to the next block).
    """
    block, token, head = ((0,) * (4 - len(stride)) + tuple(stride))[:-1]
    blocks, tokens, heads, d = (1,) * (4 - len(shape)) + tuple(shape)
    # A single token's stride binds nothing, but as the pitch it gives the constants, and the kernel, of many tokens.
    natural = blocks == 1 and token % 16 == 0 and token >= (heads - 1) * head + d
    pitch = token if tokens > 1 or natural else max(block, head, d)
    beside = heads == 1 or head < pitch
    row_h, col_h = (0, 0) if heads == 1 else (0, head) if beside else (head // pitch, 0)
    row_b = block // pitch if blocks > 1 else 0
    columns = (heads - 1) * col_h + d
    rows = (blocks - 1) * row_b + (heads - 1) * row_h + tokens
    require(
        (blocks == 1 or block % pitch == 0) and (beside or head % pitch == 0) and columns <= pitch and rows < 1 << 31,
        f"{name} has shape {list(shape)} and strides {tuple(stride)}; the Hopper kernel takes caches whose strides of "
        "blocks and heads are multiples of the tokens', or whose heads lie within a token, and fewer than 2^31 rows",
    )
    return rows, columns, pitch, row_h, col_h, row_b
