"""The switches a user sets in the environment, read once and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from zyfa_backend.config import AttentionConfig, ConfigError, parse

# Name -> what it does; `zyfa doctor` and the README print this table.
VARIABLES = {
    "ZYFA_CONFIG": "numerics: a preset (exact, lean, lean-no-rotation, int8, unquantized), with ,field=value overrides",
    "ZYFA_FALLBACK": "1 leaves layers that ZYFA does not support to the engine's backend instead of refusing to start",
    "ZYFA_SCALES": "safetensors file with K and V scales per layer and head, used instead of calibration",
    "ZYFA_SAVE_SCALES": "file to which calibrated K and V scales are written, layer by layer as they freeze",
    "ZYFA_HEADROOM": "factor between the calibrated maximum and the largest value that the cache can hold",
    "ZYFA_STATS": "directory to which each process writes which kernels ran, as stats-<pid>.json",
}


@dataclass(frozen=True)
class Settings:
    """Parsed values of VARIABLES; None or False where a variable is unset."""

    config: AttentionConfig | None = None
    fallback: bool = False
    scales: str | None = None
    save_scales: str | None = None
    headroom: float | None = None
    stats: str | None = None


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that look like ours and are not: most often a typing error."""
    names = os.environ if environ is None else environ
    return sorted(name for name in names if name.startswith("ZYFA_") and name not in VARIABLES)


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check the switches. Raises ConfigError naming the variable, its value and what is accepted."""
    env = os.environ if environ is None else environ
    config = None
    if text := env.get("ZYFA_CONFIG", "").strip():
        try:
            config = parse(text)
        except ConfigError as error:
            raise ConfigError(f"ZYFA_CONFIG={text}: {error}") from None
    fallback = env.get("ZYFA_FALLBACK", "").strip()
    if fallback not in ("", "0", "1"):
        raise ConfigError(f"ZYFA_FALLBACK={fallback} is not accepted; it is 0 or 1")
    scales = env.get("ZYFA_SCALES") or None
    if scales and not os.path.isfile(scales):
        raise ConfigError(f"ZYFA_SCALES={scales}: there is no such file")
    save = env.get("ZYFA_SAVE_SCALES") or None
    if save and not os.path.isdir(os.path.dirname(os.path.abspath(save))):
        raise ConfigError(f"ZYFA_SAVE_SCALES={save}: its directory does not exist")
    headroom = None
    if text := env.get("ZYFA_HEADROOM", "").strip():
        try:
            headroom = float(text)
        except ValueError:
            headroom = 0.0
        if not 1.0 <= headroom <= 64.0:
            raise ConfigError(f"ZYFA_HEADROOM={text} is not accepted; it is a number from 1 to 64")
    return Settings(config, fallback == "1", scales, save, headroom, env.get("ZYFA_STATS") or None)
