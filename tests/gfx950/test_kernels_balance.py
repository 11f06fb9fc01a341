"""Causal work over the compute units: workgroups start in the order of the grid, those with the most keys first."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
import torch
from fp8_cases import gaussian, launch, name
from zyfa_kernels.runtime.attention import Array, attention_launch

from zyfa_backend import kernel_devices

COMPUTE_UNITS = 256  # of an MI355X; the kernels' LDS leaves room for one workgroup on each
SET_UP = 2  # of a workgroup, in tiles of 128 keys


class FirstOfTheGrid(kernel_devices.EmulatorDevice):
    """Runs the workgroups with z = 0 alone."""

    def run(self, launch) -> int:
        return super().run(replace(launch, grid=(*launch.grid[:2], 1)))


def test_the_first_workgroups_take_the_last_queries():
    """One per head and sequence; a shorter sequence's come later, their place in the first row of the grid is empty."""
    problems = [gaussian(600, 2, 1), gaussian(300, 2, 1)]
    kernel = name(causal=True, lean=True)
    device = FirstOfTheGrid(kernel_devices.loaded(kernel))
    ((out, _), (shorter, _)), _ = kernel_devices.launch(device, kernel, problems)
    ((whole, _), _) = launch(problems)
    assert torch.equal(out[512:], whole[512:])
    assert torch.isnan(out[:512]).all() and torch.isnan(shorter).all()


def makespan(seq: int, heads: int, longest_first: bool) -> float:
    """Time of the last compute unit over the mean, when each takes the grid's next workgroup as soon as it is free."""
    array = Array(address=1 << 20, row=heads * 128, head=128)
    grid = attention_launch(
        name(causal=True, lean=True), q=array, k=array, v=array, out=replace(array, row=heads * 256, head=256),
        q_scale=Array(1 << 20, heads * 4, 4), k_scale=1 << 20, v_scale=1 << 20, scale_per_head=True,
        cu_seqlens_q=1 << 20, cu_seqlens_k=1 << 20, batch=1, max_seqlen_q=seq, max_seqlen_k=seq,
        q_heads=heads, kv_heads=heads, softmax_scale=0.1, delta=0.0,
    ).grid  # fmt: skip
    jobs = []
    for z in range(grid[2]):
        tile = grid[2] - 1 - z if longest_first else z  # of 256 queries, which see two tiles of keys more than the last
        jobs += [2 * (tile + 1) + SET_UP] * (grid[0] * grid[1])
    busy = [0] * COMPUTE_UNITS
    for job in jobs:
        heapq.heapreplace(busy, busy[0] + job)
    return max(busy) / (sum(jobs) / COMPUTE_UNITS)


@pytest.mark.parametrize(("seq", "heads"), [(4096, 32), (8192, 32), (16384, 8), (32768, 8), (5000, 40), (10000, 28)])
def test_the_last_compute_unit_ends_with_the_mean(seq, heads):
    """Where there are workgroups for two rounds or more; modelled. In the order of the queries it would take longer."""
    assert makespan(seq, heads, True) < 1.1 < 1.19 < makespan(seq, heads, False)
