"""The gfx950 kernels by name."""

from __future__ import annotations

from functools import cache

from ..asm import fp8_hd128
from ..asm.kernel import Kernel

_BUILDERS = {variant.name: (fp8_hd128.build, variant) for variant in fp8_hd128.VARIANTS}


class UnknownKernel(ValueError):
    """No kernel has that name; the message lists the names."""


def names() -> tuple[str, ...]:
    return tuple(sorted(_BUILDERS))


@cache
def kernel(name: str) -> Kernel:
    """Generate a kernel (about half a second); kept for the life of the process."""
    if name not in _BUILDERS:
        raise UnknownKernel(f"no kernel is named {name!r}; there are {', '.join(names())}")
    build, variant = _BUILDERS[name]
    return build(variant)
