"""A checked call of `decode`, prepared once for all calls that differ in the data and the lengths alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from zyfa_kernels.triton.decode_kernel import attend_kernel, combine_kernel, maxima_kernel
from zyfa_kernels.triton.launcher import Launch, on
from zyfa_kernels.triton.targets import Target
from zyfa_kernels.triton.transpose import TILE

LOG2E = 1 / math.log(2)
WORKSPACE_BYTES = 1 << 28  # of splits at a time; larger batches are taken in parts
LEAST_TILES = 2  # of a split
LEAST_MOST_SPLITS, MOST_SPLITS_OF_HEADS = 32, 256
PROGRAMS = 1024  # about as many share the splits, however many there could be
COMBINED_AT_ONCE = 16
THREADS = 256  # of a program: with 128, Hopper's registers do not hold a tile of V widened to fp16


def most_splits(kv_heads: int) -> int:
    """Of a sequence: enough that a single one occupies a GPU. Longer sequences get longer splits."""
    return max(LEAST_MOST_SPLITS, MOST_SPLITS_OF_HEADS // kv_heads)


class DecodeCall:
    """tensors: q_codes, q_scale, k_cache, v_cache, k_scale, v_scale, out, lse, block_table, seqlens_k.
    numbers: softmax_scale, window, p, qk_format, offset, delta.
    """

    def __init__(self, target: Target, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        q, q_scale, k, v, k_scale, v_scale, out, _, block_table, _ = tensors
        softmax_scale, window, p, qk_format, offset, delta = numbers
        self.device, self.window, self.delta = q.device, window, float(delta)
        self.softmax_scale_log2 = float(softmax_scale) * LOG2E
        (self.batch, self.hq, d), (self.hkv, self.dv) = q.shape, v.shape[-2:]
        self.table_stride = block_table.stride(0)
        self.without_keys = k.numel() == 0
        group, int8 = self.hq // self.hkv, qk_format == "int8"
        tile_m = min(max(triton.next_power_of_2(group), 16), 64)
        parts = triton.cdiv(group, tile_m)
        self.rows = self.hkv * parts
        self.most = most_splits(self.hkv)
        cut = (self.most, LEAST_TILES)
        scales = (*q_scale.stride(), int(k_scale.numel() > 1), int(v_scale.numel() > 1))
        dims = (128, 64) if d == 192 else (d, 0)
        form = (int8, target.native)
        code = torch.int8 if int8 else torch.uint8
        key = (q.device, out.dtype)
        warps = THREADS // (64 if torch.version.hip else 32)
        self.maxima = Launch(
            maxima_kernel,
            (*q.stride()[:2], *k.stride()[:3], group, parts, *dims, k.shape[1], window is not None, *form, *cut, tile_m)
            + (TILE,),
            {0: code, 1: code},
            key,
            num_warps=warps,
        )
        self.attend = Launch(
            attend_kernel,
            (*q.stride()[:2], *scales[:2], *k.stride()[:3], *v.stride()[:3], scales[2], group, parts, *dims, self.dv)
            + (k.shape[1], window is not None, p == "lean", *form, target.ptx, float(offset), *cut, tile_m, TILE),
            {0: code, 2: code, 3: torch.uint8},
            key,
            num_warps=warps,
        )
        self.combine = Launch(
            combine_kernel,
            (*scales, *out.stride()[:2], group, self.dv, window is not None, target.native)
            + (float(offset), *cut, TILE, COMBINED_AT_ONCE),
            {},
            key,
            num_warps=4,
        )

    def run(self, tensors: tuple[Any, ...], max_seqlen_k: int) -> None:
        """Launches, for tensors of the shapes, strides and dtypes that the call was prepared with."""
        out, lse = tensors[6], tensors[7]
        if out.numel() == 0:
            return
        if self.without_keys or max_seqlen_k == 0:
            out.zero_()
            lse.fill_(-math.inf)
        else:
            with on(self.device):
                self._run(tensors, max_seqlen_k)

    def _run(self, tensors: tuple[Any, ...], longest: int) -> None:
        q, q_scale, k, v, k_scale, v_scale, out, lse, block_table, seqlens_k = tensors
        tiles = triton.cdiv(longest, TILE)
        if self.window is not None:
            tiles = min(tiles, triton.cdiv(self.window, TILE) + 1)
        splits = min(triton.cdiv(tiles, LEAST_TILES), self.most)
        sizes = [self.hq * n for n in (splits * self.dv, tiles, splits * 3)]  # of a sequence
        step = min(self.batch, max(1, WORKSPACE_BYTES // (4 * sum(sizes))))
        workspace = torch.empty(step * sum(sizes), dtype=torch.float32, device=self.device)
        partial, maxima, state = workspace.split([step * n for n in sizes])
        for first in range(0, self.batch, step):
            sequences = min(step, self.batch - first)
            grid = (min(splits, triton.cdiv(PROGRAMS, self.rows * sequences)), self.rows, sequences)
            rows = (seqlens_k, first, longest, self.window or 0)
            where = (block_table, *rows, self.table_stride, tiles)
            scale = self.softmax_scale_log2
            if splits > 1:
                self.maxima(grid, (q, k, maxima, *where))
            kept = (partial, state)
            self.attend(grid, (q, q_scale, k, v, k_scale, maxima, *kept, *where, splits, scale, self.delta))
            grid = (self.hq, sequences, 1)
            self.combine(grid, (q_scale, k_scale, v_scale, *kept, out, lse, *rows, splits, lse.stride(0), scale))
