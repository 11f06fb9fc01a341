"""Code objects on disk, keyed by the text they were assembled from."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from .files import write_whole
from .registry import kernel
from .toolchain import assemble


def folder() -> Path:
    """`$ZYFA_CACHE_DIR`, else `$XDG_CACHE_HOME/zyfa`, else `~/.cache/zyfa`."""
    chosen = os.environ.get("ZYFA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zyfa")


def code_object(name: str) -> bytes:
    """The linked code object of a kernel, assembled on first use. A folder that can't be written is no error.

    A file's name ends in the hash of its content: one that is damaged is removed and assembled anew.
    """
    text = kernel(name).text()
    stem = f"{name}-{_digest(text.encode())}"
    with suppress(OSError):
        for path in sorted(folder().glob(f"{stem}-*.hsaco")):
            code = path.read_bytes()
            if path.stem == f"{stem}-{_digest(code)}":
                return code
            path.unlink()
    code = assemble(text)
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        write_whole(folder() / f"{stem}-{_digest(code)}.hsaco", code)
    return code


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
