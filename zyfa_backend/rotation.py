"""Orthonormal rotations of Q and K over the head dimension.

A rotation R is applied to Q and to K alike, so that R(q)·R(k) = q·k; it spreads outliers over all channels before
they are quantised. K is stored rotated: whoever reads that cache must rotate Q by the same kind.

The transform is a fixed butterfly of additions rather than a matrix product: every row is computed in the same order
whatever the number of rows, so that a token has the same bits alone, in a chunk and in a batch.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import torch

from zyfa_backend.config import ROTATIONS

# Each head dimension as blocks on the diagonal; 192 is MLA's 128 "nope" and 64 rope channels.
_BLOCKS: dict[int, tuple[int, ...]] = {64: (64,), 96: (96,), 128: (128,), 192: (128, 64)}
HEAD_DIMS = tuple(_BLOCKS)
CHUNK = 1 << 17  # elements worked on at a time, so that intermediates stay in a core's cache
_FEW = 1 << 13  # elements below which the number of calls decides the time


class RotationError(ValueError):
    """The rotation kind or the head dimension is not accepted; the message names what is."""


def check(dim: int, kind: str) -> None:
    """Raises RotationError unless `rotate` accepts vectors of `dim` channels with `kind`."""
    if kind not in ROTATIONS:
        raise RotationError(f"rotation={kind!r} is not accepted; choose one of {', '.join(ROTATIONS)}")
    if kind != "none" and dim not in _BLOCKS:
        raise RotationError(f"no rotation for head dimension {dim}; accepted: {', '.join(map(str, HEAD_DIMS))}")


def rotate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Rotates the last dimension of x.

    x: [..., D], any floating dtype; D in (64, 96, 128, 192) unless kind is "none".
    kind: "hadamard", "signed" (fixed random signs, then Hadamard) or "none" (only converts).
    Returns fp32 of the same shape, computed in fp32. Raises RotationError.
    """
    dim = x.shape[-1]
    check(dim, kind)
    if kind == "none":
        return x.float()
    rows = x.reshape(-1, dim)
    if rows.shape[0] <= CHUNK // dim:
        return _rotate_rows(rows, kind).view(x.shape)
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    for part, target in zip(rows.split(CHUNK // dim), out.split(CHUNK // dim), strict=True):
        target.copy_(_rotate_rows(part, kind))
    return out.view(x.shape)


def _rotate_rows(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x [N, D] rotated, fp32; a new tensor."""
    dim = x.shape[-1]
    rows = x * _signs(dim, x.device) if kind == "signed" else x.to(torch.float32, copy=True)
    if dim == 192:
        turned = torch.cat([_hadamard_power_of_two(part.contiguous()) for part in rows.split(_BLOCKS[dim], -1)], -1)
    else:
        turned = _hadamard_96(rows) if dim == 96 else _hadamard_power_of_two(rows)
    return turned


@lru_cache(maxsize=64)
def matrix(dim: int, kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """The rotation as a matrix M [D, D] with rotate(x) = x @ M. Raises RotationError. Do not modify."""
    check(dim, kind)
    if kind == "none":
        return torch.eye(dim, dtype=dtype, device=device)
    blocks = []
    for size in _BLOCKS[dim]:
        block = torch.kron(_paley_12(), _sylvester(8)) if size == 96 else _sylvester(size)
        blocks.append(block / math.sqrt(size))
    full = torch.block_diag(*blocks)
    if kind == "signed":
        full = _signs(dim, torch.device("cpu")).to(full.dtype)[:, None] * full
    return full.to(dtype=dtype, device=device)


@lru_cache(maxsize=64)
def tables(dim: int, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a loop needs to rotate: signs [D], sizes of the diagonal's blocks, the matrix [12, 12] of a block of 96.

    Signs and matrix are fp32; no blocks for kind "none". Raises RotationError.
    """
    check(dim, kind)
    signs = _signs(dim, torch.device("cpu")) if kind == "signed" else torch.ones(dim, dtype=torch.float32, device="cpu")
    sizes = np.array(() if kind == "none" else _BLOCKS[dim], np.int64)
    return signs.numpy(), sizes, _paley_12().float().numpy()


def _sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64, device="cpu")  # engines make a GPU the default while they load a model
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


@lru_cache(maxsize=1)
def _paley_12() -> torch.Tensor:
    """Hadamard matrix of order 12 (Paley's first construction over the field of 11 elements), fp64."""
    squares = {i * i % 11 for i in range(1, 11)}
    h = torch.ones(12, 12, dtype=torch.float64, device="cpu")
    h[1:, 0] = -1
    for i in range(11):
        for j in range(11):
            h[i + 1, j + 1] = 1.0 if i == j or (j - i) % 11 in squares else -1.0
    return h


@lru_cache(maxsize=16)
def _signs(dim: int, device: torch.device) -> torch.Tensor:
    """Signs [D] in fp32, from a hash so that every version and machine has the same."""
    bits = int.from_bytes(hashlib.sha256(f"zyfa-rotation-signs-{dim}".encode()).digest(), "big")
    return torch.tensor([1.0 if bits >> i & 1 else -1.0 for i in range(dim)], dtype=torch.float32, device=device)


def _hadamard_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """x [N, 2^n] times Sylvester's matrix over sqrt(2^n); overwrites x."""
    return _butterflies(x, x.shape[-1]).mul_(1 / math.sqrt(x.shape[-1]))


def _butterflies(x: torch.Tensor, size: int) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform of each run of `size` channels of x [N, D] fp32; overwrites x."""
    if x.numel() <= _FEW:
        for partner, sign in _stages(x.shape[-1], size, x.device):
            x = torch.addcmul(x.index_select(1, partner), x, sign)  # a - b as a + b · -1, which rounds alike
        return x
    source, target = x, torch.empty_like(x)
    half = size // 2
    while half >= 1:
        a, b = source.view(-1, 2, half), target.view(-1, 2, half)
        torch.add(a[:, 0], a[:, 1], out=b[:, 0])
        torch.sub(a[:, 0], a[:, 1], out=b[:, 1])
        source, target = target, source
        half //= 2
    return source


@lru_cache(maxsize=64)
def _stages(dim: int, size: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each stage of the butterflies: the channel that each one meets, and its own sign."""
    channel = torch.arange(dim, device=device)
    stages = []
    half = size // 2
    while half >= 1:
        stages.append((channel ^ half, torch.where(channel & half == 0, 1.0, -1.0).float()))
        half //= 2
    return stages


def _hadamard_96(x: torch.Tensor) -> torch.Tensor:
    """x [N, 96] times (Paley 12 ⊗ Sylvester 8)/sqrt(96): butterflies over runs of 8, then 12 additions in order."""
    runs = _butterflies(x, 8).view(-1, 12, 8)
    signs = _paley_12().to(device=x.device, dtype=torch.float32)
    total = runs[:, 0:1] * signs[0][:, None]
    for j in range(1, 12):
        total.addcmul_(runs[:, j : j + 1].expand_as(total), signs[j][:, None].expand_as(total))
    return total.mul_(1 / math.sqrt(96)).view(-1, 96)
