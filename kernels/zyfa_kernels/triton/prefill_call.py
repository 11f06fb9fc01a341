"""A checked call of `prefill`, prepared once for all calls that differ in the data alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from zyfa_kernels.triton.launcher import Launch, on
from zyfa_kernels.triton.prefill_kernel import prefill_kernel
from zyfa_kernels.triton.targets import Target
from zyfa_kernels.triton.transpose import TILE, transpose_kernel

LOG2E = 1 / math.log(2)


class Call:
    """tensors: q, q_scale, k, v, k_scale, v_scale, out, out_scale, lse, block_table, cu_seqlens_q, lengths_k; the
    optional ones None. numbers: max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, p, qk_format, offset, delta.
    """

    def __init__(
        self,
        target: Target,
        tensors: tuple[Any, ...],
        numbers: tuple[Any, ...],
        workspace_bytes: int,
    ) -> None:
        q, q_scale, k, v, k_scale, v_scale, out, out_scale, lse, block_table, cu_seqlens_q, _ = tensors
        self.max_seqlen_q, max_seqlen_k, softmax_scale, self.causal, self.window, p, qk_format, offset, delta = numbers
        self.target, self.device = target, q.device
        self.max_seqlen_k = max(max_seqlen_k, 1)
        self.softmax_scale_log2 = softmax_scale * LOG2E
        self.lean, self.int8 = p == "lean", qk_format == "int8"
        self.offset, self.delta = float(offset), float(delta)
        self.batch, self.tokens = cu_seqlens_q.shape[0] - 1, q.shape[0]
        (self.hq, self.d), (self.hkv, self.dv) = q.shape[1:], v.shape[-2:]
        self.block_size = k.shape[1] if block_table is not None else 0
        self.table_stride = block_table.stride(0) if block_table is not None else 0
        self.k_strides, self.v_strides = self._strides(k), self._strides(v)
        self.scale_strides = (int(k_scale.numel() > 1), int(v_scale.numel() > 1))
        self.with_lse, self.fp8_out = lse is not None, out_scale is not None
        self.tiles = triton.cdiv(self.max_seqlen_k, TILE)
        self.per_sequence = self.tiles * self.hkv * self.dv * TILE
        self.step = min(self.batch, max(1, workspace_bytes // self.per_sequence))
        self.without_keys = k.numel() == 0
        self.empty = self.without_keys or self.tokens == 0 or self.batch == 0 or self.max_seqlen_q == 0
        if self.empty:
            return
        self.transpose = self._transpose_launch()
        if target.kernel == "hopper":
            from zyfa_kernels.triton.hopper_launch import HopperAttention

            self.attend: Any = HopperAttention(self, q, k, q_scale, out, lse)
        else:
            self.attend = self._attend

    def run(self, tensors: tuple[Any, ...]) -> None:
        """Launches, for tensors of the shapes, strides and dtypes that the call was prepared with."""
        if self.without_keys:
            tensors[6].zero_()
            if tensors[8] is not None:
                tensors[8].fill_(-math.inf)
        if self.empty:
            return
        with on(self.device):
            self._run(tensors)

    def _run(self, tensors: tuple[Any, ...]) -> None:
        k, v, block_table, cu_seqlens_q, lengths_k = tensors[2], tensors[3], *tensors[9:]
        table = block_table if block_table is not None else lengths_k
        vt = torch.empty(self.step * self.per_sequence, dtype=torch.uint8, device=self.device)
        bad = torch.empty(self.step * self.tiles * self.hkv, dtype=torch.int32, device=self.device)
        for first in range(0, self.batch, self.step):
            sequences = min(self.step, self.batch - first)
            arguments = (k, v, vt, bad, table, cu_seqlens_q, lengths_k, first, self.table_stride, self.window or 0)
            self.transpose((self.tiles, self.hkv, sequences), arguments)
            self.attend(tensors, vt, bad, first, sequences)

    def _strides(self, x: Any) -> tuple[int, int, int]:
        """(block, token, head) strides of a cache, 0 for the block where it is packed."""
        return x.stride(0) if self.block_size else 0, x.stride(-3), x.stride(-2)

    def _transpose_launch(self) -> Launch:
        constants = (
            *(s // 4 for s in self.k_strides),
            *(s // 4 for s in self.v_strides),
            self.d,
            self.dv,
            self.block_size,
            self.window is not None,
            self.target.kernel == "hopper",
            self.int8,
            TILE,
        )
        words = {0: torch.int32, 1: torch.int32, 2: torch.int32}
        return Launch(transpose_kernel, constants, words, (self.device,), num_warps=4)

    def _attend(
        self, tensors: tuple[Any, ...], vt: torch.Tensor, bad: torch.Tensor, first: int, sequences: int
    ) -> None:
        """The plain kernel."""
        q, q_scale, k, v, k_scale, v_scale, out, out_scale, lse, block_table, cu_seqlens_q, lengths_k = tensors
        code = torch.int8 if self.int8 else torch.uint8
        q, k, v = q.view(code), k.view(code), v.view(torch.uint8)
        tile = self.target.tile(self.d)
        prefill_kernel[(triton.cdiv(self.max_seqlen_q, tile["tile_m"]), self.hq, sequences)](
            q,
            q_scale,
            k,
            v,
            vt,
            bad,
            k_scale,
            v_scale,
            out.view(torch.uint8) if self.fp8_out else out,
            out_scale,
            lse,
            block_table,
            cu_seqlens_q,
            lengths_k,
            first,
            self.table_stride,
            *q.stride()[:2],
            *q_scale.stride(),
            *self.k_strides,
            *self.v_strides,
            *out.stride()[:2],
            lse.stride(0) if self.with_lse else 0,
            *self.scale_strides,
            self.hq // self.hkv,
            self.tiles,
            self.softmax_scale_log2,
            self.delta,
            self.window or 0,
            D1=128 if self.d == 192 else self.d,
            D2=64 if self.d == 192 else 0,
            DV=self.dv,
            BLOCK=self.block_size,
            CAUSAL=self.causal,
            WINDOW=self.window is not None,
            LEAN=self.lean,
            INT8=self.int8,
            HALF=self.target.half,
            NATIVE=self.target.native,
            PTX=self.target.ptx,
            OFFSET=self.offset,
            LSE=self.with_lse,
            FP8_OUT=self.fp8_out,
            TILE_M=tile["tile_m"],
            TILE=TILE,
            num_warps=tile["num_warps"],
            num_stages=tile["num_stages"],
        )
