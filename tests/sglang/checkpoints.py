"""Checkpoints of tiny models as SGLang reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zyfa_backend.models.make import make

# What SGLang reads of a DeepSeek-V2 and transformers doesn't write.
DEEPSEEK = {"moe_layer_freq": 1, "scoring_func": "softmax"}


def checkpoint(name: str, folder: Path, **config: Any) -> Path:
    """A model of `zyfa model make` in a folder of its own under `folder`, with entries of its config.json replaced."""
    path = Path(make(name, folder / name)["path"])
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path
