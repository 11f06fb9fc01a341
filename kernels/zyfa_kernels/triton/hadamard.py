"""The rotations of Q and K as tables that a kernel reads.

The same rotations as `zyfa_backend.rotation`, which this package doesn't import: Sylvester's Hadamard matrix of order
64 or 128, Paley's of order 12 times Sylvester's of order 8 for 96, and 128 ⊕ 64 on the diagonal for 192 (MLA's "nope"
and rope channels). "signed" turns fixed signs first. Entries are ±1; the factor 1/sqrt(order) is the kernel's.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

ROTATIONS = ("hadamard", "signed", "none")
# Each head dimension as orders of the blocks on the diagonal.
BLOCKS: dict[int, tuple[int, ...]] = {64: (64,), 96: (96,), 128: (128,), 192: (128, 64)}


def padded(order: int) -> int:
    """The smallest power of two that is at least `order`: the size of a kernel's tile."""
    return 1 << (order - 1).bit_length()


@lru_cache(maxsize=64)
def matrices(dim: int, kind: str, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The blocks M [padded order]² of the rotation with x @ M / sqrt(order), zero beyond the order. Do not modify."""
    found, start = [], 0
    for order in BLOCKS[dim]:
        block = torch.kron(_paley_12(), _sylvester(8)) if order == 96 else _sylvester(order)
        if kind == "signed":
            block = signs(dim)[start : start + order, None] * block
        full = torch.zeros(padded(order), padded(order))
        full[:order, :order] = block
        found.append(full.to(device=device, dtype=dtype))
        start += order
    return tuple(found)


@lru_cache(maxsize=64)
def tables(dim: int, turn: str, kind: str, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What a kernel reads for each block: the padded matrix for "dot", signs for "butterfly"; a zero for "none"."""
    if turn == "none":
        return (torch.zeros(1, device=device),)
    if turn == "dot":
        # Triton's interpreter, which a CPU means, multiplies bf16 wrongly.
        return matrices(dim, kind, torch.float32 if device.type == "cpu" else dtype, device)
    of_channels = signs(dim) if kind == "signed" else torch.ones(dim)
    return tuple(part.contiguous().to(device) for part in of_channels.split(BLOCKS[dim]))


def signs(dim: int) -> torch.Tensor:
    """The ±1 of "signed", fp32 [dim], from a hash so that every version and machine has the same."""
    bits = int.from_bytes(hashlib.sha256(f"zyfa-rotation-signs-{dim}".encode()).digest(), "big")
    return torch.tensor([1.0 if bits >> i & 1 else -1.0 for i in range(dim)])


def _sylvester(order: int) -> torch.Tensor:
    h = torch.ones(1, 1)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while h.shape[0] < order:
        h = torch.kron(pair, h)
    return h


def _paley_12() -> torch.Tensor:
    """Order 12 by Paley's first construction over the field of 11 elements: I + S, S skew with the residues' signs."""
    residues = {i * i % 11 for i in range(1, 11)}
    h = torch.ones(12, 12)
    h[1:, 0] = -1
    for i in range(11):
        for j in range(11):
            h[1 + i, 1 + j] = 1.0 if (j - i) % 11 in residues | {0} else -1.0
    return h
