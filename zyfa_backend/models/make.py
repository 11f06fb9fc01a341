"""Checkpoints in Hugging Face's format, made on the spot: tiny random ones, and a small real model.

Each is deterministic: the same name gives the same files with the same versions of torch, transformers and tokenizers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zyfa_backend.models import smollm2, tiny
from zyfa_backend.models.errors import ModelError, require

_MAKERS: dict[str, Callable[[Path], None]] = {**tiny.MAKERS, "smollm2-hd128": smollm2.make}
NAMES = tuple(_MAKERS)


def make(name: str, directory: str | Path) -> dict[str, Any]:
    """Writes the checkpoint `name` into `directory`, which must not exist or be empty.

    Returns {path, architecture, head_dim, v_head_dim, layers, q_heads, kv_heads}; head_dim is that of Q and K. The
    directory appears only when it is complete. Raises ModelError.
    """
    if name not in _MAKERS:
        raise ModelError(f"there is no model {name!r}; choose one of {', '.join(NAMES)}")
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty directory; nothing was written")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as place:
            built = Path(place) / "model"
            built.mkdir()
            _MAKERS[name](built)
            for file in built.iterdir():  # some writers go through a private temporary file and keep its mode
                file.chmod(0o666 & ~_umask())
            if target.exists():
                target.rmdir()
            shutil.move(built, target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error}") from error
    return describe(target)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def describe(directory: str | Path) -> dict[str, Any]:
    """What `make` returns, of any checkpoint directory. Raises ModelError."""
    try:
        config = require("transformers").AutoConfig.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ModelError(f"{directory} is not a Hugging Face checkpoint: {first}") from error
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    v_head_dim = head_dim
    if getattr(config, "kv_lora_rank", None):  # MLA: "nope" and rotary channels side by side
        head_dim, v_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return {
        "path": str(directory),
        "architecture": (config.architectures or ["unknown"])[0],
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "layers": config.num_hidden_layers,
        "q_heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", heads),
    }
