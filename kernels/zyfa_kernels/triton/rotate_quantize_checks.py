"""Checks of the arguments of `rotate_quantize`."""

from __future__ import annotations

from typing import Any

import torch

from . import hadamard

Tensors = tuple[torch.Tensor | None, ...]
FORMATS = ("fp8_e4m3", "int8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METHODS = ("dot", "butterfly")
LARGEST_DIM = 256


class ArgumentError(ValueError):
    """An argument is not accepted; the message names it, its value and what would be."""


def tokens(tensors: Tensors) -> None:
    """The numbers of tokens, which alone may change from call to call of a plan."""
    q, out, q_scale, k, v, _, _, slots, *_ = tensors
    if q is not None and not q.shape[0] == out.shape[0] == q_scale.shape[0]:  # type: ignore[union-attr]
        raise ArgumentError(f"out and scale have {out.shape[0]} and {q_scale.shape[0]} tokens, q has {q.shape[0]}")  # type: ignore[union-attr]
    if slots is not None and not slots.shape[0] <= k.shape[0] == v.shape[0]:  # type: ignore[union-attr]
        raise ArgumentError(
            f"k and v have {k.shape[0]} and {v.shape[0]} tokens, slot_mapping has {slots.shape[0]}; "  # type: ignore[union-attr]
            f"expected as many of k as of v, and no more slots"
        )


def tensors(**given: Any) -> None:
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name}={x!r} is not accepted; expected a tensor")


def optional(**given: Any) -> None:
    for name, x in given.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name}={x!r} is not accepted; expected a tensor or None")


def expect(name: str, tensor: torch.Tensor, shape, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes or tensor.device != device:
        wanted = " or ".join(map(str, dtypes))
        raise ArgumentError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; "
            f"expected {list(shape)} {wanted} on {device}"
        )


def input(name: str, x: torch.Tensor) -> None:
    if x.dim() != 3 or x.dtype not in DTYPES or not 1 <= x.shape[2] <= LARGEST_DIM or x.shape[1] < 1:
        raise ArgumentError(
            f"{name} is {list(x.shape)} {x.dtype}; expected [T, H, D] with D up to {LARGEST_DIM} "
            f"in bfloat16, float16 or float32"
        )


def cache(name: str, cache: torch.Tensor, x: torch.Tensor, k_cache: torch.Tensor) -> None:
    shape = (*k_cache.shape[:2], *x.shape[1:])
    if k_cache.dim() != 4 or cache.shape != shape or cache.dtype != torch.uint8 or cache.device != x.device:
        raise ArgumentError(
            f"{name} is {list(cache.shape)} {cache.dtype} on {cache.device}; expected [num_blocks, block_size, "
            f"{x.shape[1]}, {x.shape[2]}] in uint8, int8 or float8_e4m3fn on {x.device}, K and V with the same blocks"
        )


def slots(slots: torch.Tensor, k: torch.Tensor) -> None:
    accepted = (torch.int32, torch.int64)
    if slots.dim() != 1 or slots.dtype not in accepted or slots.device != k.device or slots.shape[0] > k.shape[0]:
        raise ArgumentError(
            f"slot_mapping is {list(slots.shape)} {slots.dtype} on {slots.device}; expected at most [{k.shape[0]}] "
            f"in int32 or int64 on {k.device}"
        )


def scale(name: str, scale: torch.Tensor, k: torch.Tensor) -> None:
    shape: tuple[int, ...] = (1,) if scale.numel() == 1 and scale.dim() <= 1 else (k.shape[1],)
    if scale.dim() == 0:
        shape = ()
    expect(name, scale, shape, (torch.float32,), k.device)


def saturated(saturated: torch.Tensor | None, device: torch.device) -> None:
    if saturated is not None:
        expect("saturated", saturated, (2,), (torch.int64,), device)
        if saturated.stride(0) != 1:
            raise ArgumentError("saturated has a stride; expected two counters side by side")


def form(qk_format: str) -> None:
    if qk_format not in FORMATS:
        raise ArgumentError(f"qk_format={qk_format!r} is not accepted; choose one of {', '.join(FORMATS)}")


def rotation(x: torch.Tensor, rotation: str | None, method: str | None) -> tuple[tuple[int, ...], str]:
    """(orders of the blocks on the rotation's diagonal, the kernels' ROTATE). x: [T, H, D]."""
    dim = x.shape[2]
    if rotation not in (None, *hadamard.ROTATIONS):
        raise ArgumentError(f"rotation={rotation!r} is not accepted; choose one of {', '.join(hadamard.ROTATIONS)}")
    if method not in (None, *METHODS):
        raise ArgumentError(f"method={method!r} is not accepted; choose one of {', '.join(METHODS)}")
    if rotation in (None, "none"):
        return (dim,), "none"
    if dim not in hadamard.BLOCKS:
        accepted = ", ".join(map(str, hadamard.BLOCKS))
        raise ArgumentError(f"no rotation for head dimension {dim}; accepted: {accepted}")
    if method == "butterfly" and dim == 96:
        raise ArgumentError('method="butterfly" has no head dimension 96, which is no power of two; use "dot"')
    return hadamard.BLOCKS[dim], method or ("butterfly" if x.dtype == torch.float32 and dim != 96 else "dot")
