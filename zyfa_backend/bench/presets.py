"""The models in configs/models: attention shapes for kernels, and config.json facts to serve with dummy weights."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from .errors import BenchError

# Beside the sources, or where an installation puts its data.
FOLDERS = (Path(__file__).parents[2] / "configs" / "models", Path(sys.prefix) / "share" / "zyfa" / "configs" / "models")


@dataclass(frozen=True)
class Preset:
    """One model. attention: shape ("hd128", "mla"), q_heads, kv_heads; config: the document for config.json."""

    name: str
    source: str
    parameters: int
    attention: dict[str, Any]
    config: dict[str, Any]

    @property
    def context(self) -> int:
        return int(self.config["max_position_embeddings"])

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    def write(self, directory: Path) -> Path:
        """Makes `directory` a checkpoint without weights for `--load-format dummy`; returns it."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        return directory


def folder() -> Path:
    """Where the presets are. Raises BenchError."""
    for place in FOLDERS:
        if place.is_dir():
            return place
    raise BenchError(f"the model presets are not installed; looked in {' and '.join(map(str, FOLDERS))}")


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.toml"))


def load(name: str) -> Preset:
    """The preset `name`. Raises BenchError with the names there are."""
    if name not in names():
        raise BenchError(f"there is no model preset {name!r}; choose from {', '.join(names())}")
    return read(folder() / f"{name}.toml")


def read(path: Path) -> Preset:
    try:
        facts = tomllib.loads(path.read_text())
        # TOML has no null, which config.json needs where a default would be something else.
        config = {**facts["config"], **dict.fromkeys(facts.get("null", []))}
        return Preset(facts["name"], facts["source"], facts["parameters"], facts["attention"], config)
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise BenchError(f"{path} is not a model preset: {type(error).__name__}: {error}") from None
