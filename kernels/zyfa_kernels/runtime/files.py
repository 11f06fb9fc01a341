"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` aside, in the same folder, and rename: no one sees half of it, and a failure leaves nothing.

    Raises OSError; what was at `path` is then as it was.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
