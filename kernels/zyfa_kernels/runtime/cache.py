"""Code objects on disk, keyed by the text they were assembled from."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from .registry import kernel
from .toolchain import assemble


def folder() -> Path:
    """`$ZYFA_CACHE_DIR`, else `$XDG_CACHE_HOME/zyfa`, else `~/.cache/zyfa`."""
    chosen = os.environ.get("ZYFA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zyfa")


def code_object(name: str) -> bytes:
    """The linked code object of a kernel, assembled on first use. A folder that can't be written is no error."""
    text = kernel(name).text()
    path = folder() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.hsaco"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = assemble(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed, so that another process never sees half of it.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(code)
        os.replace(part.name, path)
    except OSError:
        pass
    return code
