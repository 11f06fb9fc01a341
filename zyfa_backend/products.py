"""fp32 products a · bᵀ for the reference, by the fastest library that keeps full fp32 precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

DEPTH = 64  # of gfx950's 32x32x64


def products(a: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    """a [H, R, K] times bᵀ, b [H, N, K], per head: H tensors [R, N] in fp32.

    b's matrices are dense, row-major or column-major; a is contiguous. A result's bits depend on the shapes and on the
    operands of its own row and column only.
    """
    linear = _onednn_linear() if a.device.type == "cpu" else None
    if linear is None:
        return torch.bmm(a, b.transpose(1, 2)).unbind()
    return [linear(a[h], b[h]) for h in range(a.shape[0])]


def stepwise_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same as a chain of matrix instructions of depth DEPTH forms it, [H, R, N]: exact sums, one rounding each.

    FP8 and int8 products sum up exactly in fp64, in whatever order.
    """
    total = torch.zeros(a.shape[0], a.shape[1], b.shape[1], device=a.device)
    for start in range(0, a.shape[2], DEPTH):
        part = slice(start, start + DEPTH)
        total = torch.baddbmm(total.double(), a[..., part].double(), b[..., part].double().transpose(1, 2)).float()
    return total


@lru_cache(maxsize=1)
def _onednn_linear() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """oneDNN's fp32 inner product, or None if this torch lacks it or it disagrees with torch.matmul.

    torch.bmm goes to MKL, which leaves AVX-512 unused on processors of other makers: half the speed on a Zen 5.
    """
    try:
        op = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None

    def linear(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return op(a, b, None, "none", [], "")

    a = torch.arange(48, dtype=torch.float32).view(3, 16)
    b = torch.arange(80, dtype=torch.float32).view(5, 16).sub_(40.5)
    try:
        agrees = torch.equal(linear(a, b), a @ b.t()) and torch.equal(linear(a, b.t().contiguous().t()), a @ b.t())
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return linear if agrees else None
