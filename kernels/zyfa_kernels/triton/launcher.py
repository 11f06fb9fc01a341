"""Launches a Triton kernel without binding and specialising its arguments anew each time, which costs 100 µs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Compiled kernels by name, constants and key. The interpreter compiles nothing: there the value stays None.
_compiled: dict[tuple[Any, ...], Any] = {}


def prepared_for(key: tuple[Any, ...], prepared: dict[tuple[Any, ...], Any]) -> Any | None:
    """What was prepared for a call's facts; None for facts without a hash, too, which the checks refuse by name."""
    try:
        return prepared.get(key)
    except TypeError:
        return None


def keep(key: tuple[Any, ...], value: Any, prepared: dict[tuple[Any, ...], Any], most: int) -> None:
    """Keep what was prepared, in place of all the others once there are `most`."""
    if len(prepared) >= most:
        prepared.clear()
    prepared[key] = value


def on(device: torch.device) -> AbstractContextManager[object]:
    """Where kernels are launched on a device, which Triton takes to be the current one."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class Launch:
    """A kernel with its constants, which are its last parameters.

    typed: dtype as which the kernel sees the tensor at an index of its arguments. key: what, beside the constants,
    decides about the compiled code (the device, dtypes); all other arguments must be unspecialised.
    """

    def __init__(
        self,
        kernel: Any,
        constants: tuple[Any, ...],
        typed: dict[int, torch.dtype],
        key: tuple[Any, ...],
        **options: int,
    ) -> None:
        self.kernel, self.constants, self.typed, self.key, self.options = kernel, constants, typed, key, options
        self.compiled: dict[bool, Any] = {}

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], aligned: bool = True) -> None:
        """Launches; aligned says whether the arguments whose alignment the kernel makes use of are."""
        compiled = self.compiled.get(aligned)
        if compiled is not None:
            compiled[grid](*arguments, *self.constants)
            return
        whole = (self.kernel.__name__, self.constants, self.key, aligned)
        if _compiled.get(whole) is None:
            first = tuple(x.view(self.typed[i]) if i in self.typed else x for i, x in enumerate(arguments))
            _compiled[whole] = self.kernel[grid](*first, *self.constants, **self.options)
            self.compiled[aligned] = _compiled[whole]
        else:
            self.compiled[aligned] = _compiled[whole]
            self(grid, arguments, aligned)
