"""Executes gfx950 code objects without the hardware: emulator, static checks (`checks`) and cycle model (`cycles`)."""

from .codeobject import CodeObject, Kernel, KernelDescriptor
from .errors import CodeObjectError, EmulatorError, UnknownInstruction
from .machine import Emulator, Stats

__all__ = [
    "CodeObject",
    "CodeObjectError",
    "Emulator",
    "EmulatorError",
    "Kernel",
    "KernelDescriptor",
    "Stats",
    "UnknownInstruction",
]
