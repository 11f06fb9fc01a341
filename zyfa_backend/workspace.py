"""Buffers kept between calls: a large fresh allocation costs a page fault per 4 KiB, more than filling it does."""

from __future__ import annotations

import threading

import torch

_KEPT_BYTES = 64 << 20  # a larger buffer is not kept


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}


_buffers = _Buffers()


def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor of undefined content, valid until the same thread asks for `name` again."""
    count = 1
    for size in shape:
        count *= size
    key = (name, dtype, device)
    kept = _buffers.kept.get(key)
    if kept is None or kept.numel() < count:
        kept = torch.empty(count, dtype=dtype, device=device)
        if count * dtype.itemsize <= _KEPT_BYTES:
            _buffers.kept[key] = kept
    return kept[:count].view(shape)
