"""Assembles and links gfx950 code with the LLVM inside Triton. Needs no GPU and no ROCm."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ARCH = "gfx950"
T = TypeVar("T")


class AssemblyError(RuntimeError):
    """The assembler or linker rejected the text; the message is its own."""


def _llvm():
    try:
        from triton._C.libtriton import amd, llvm
    except ImportError as error:
        raise AssemblyError("assembling needs the triton package (3.6 or later), which brings LLVM") from error
    llvm.init_targets()
    return amd


def _stderr_of(call: Callable[[], T]) -> tuple[T | None, str]:
    """Run `call` with file descriptor 2 captured: LLVM reports errors there and returns normally."""
    with tempfile.TemporaryFile() as sink:
        saved = os.dup(2)
        os.dup2(sink.fileno(), 2)
        try:
            result: T | None = call()
        except (RuntimeError, SystemError) as error:
            result = None
            os.write(2, str(error).encode())
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        sink.seek(0)
        return result, sink.read().decode(errors="replace")


def assemble(text: str) -> bytes:
    """Assembly text to a linked code object (ELF). Raises AssemblyError with the assembler's message."""
    amd = _llvm()
    # Triton 3.6 takes (text, processor, features), later ones a target triple in between.
    takes_triple = "arg3" in (inspect.getdoc(amd.assemble_amdgcn) or "")
    target = ("amdgcn-amd-amdhsa", ARCH, "") if takes_triple else (ARCH, "")
    obj, message = _stderr_of(lambda: amd.assemble_amdgcn(text, *target))
    if not obj or "error:" in message:
        raise AssemblyError(message.strip() or "the assembler returned nothing")
    with tempfile.TemporaryDirectory() as folder:
        source, target_path = Path(folder, "kernel.o"), Path(folder, "kernel.hsaco")
        source.write_bytes(obj)
        _, message = _stderr_of(lambda: amd.link_hsaco(str(source), str(target_path)))
        if not target_path.exists() or "error:" in message:
            raise AssemblyError(message.strip() or "the linker wrote nothing")
        return target_path.read_bytes()
