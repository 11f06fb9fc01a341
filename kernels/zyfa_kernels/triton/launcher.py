"""Launches a Triton kernel without binding and specialising its arguments anew each time, which costs 100 µs."""

from __future__ import annotations

from typing import Any

import torch

# The interpreter compiles nothing: there the value stays None.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch_cached(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    typed: dict[int, torch.dtype],
    key: tuple[Any, ...],
    **options: int,
) -> None:
    """Launches kernel on grid with arguments and then constants, in the order of its parameters.

    typed: dtype as which the kernel sees the tensor at an index. key: what, beside the constants, decides about the
    compiled code (the device, dtypes, alignment that the kernel makes use of); all else must be unspecialised.
    """
    whole = (kernel.__name__, key, constants)
    compiled = _compiled.get(whole)
    grid = grid + (1,) * (3 - len(grid))
    if compiled is None:
        first = tuple(x.view(typed[i]) if i in typed else x for i, x in enumerate(arguments))
        _compiled[whole] = kernel[grid](*first, *constants, **options)
    else:
        compiled[grid](*arguments, *constants)
