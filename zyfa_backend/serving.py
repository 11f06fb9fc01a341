"""What the plugins of all engines share: numerics for a cache, scale stores, and what a server is told."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch

from zyfa_backend import dispatch, settings
from zyfa_backend.config import LEAN, UNQUANTIZED, AttentionConfig, ConfigError
from zyfa_backend.scales import ScaleStore

logger = logging.getLogger("vllm.zyfa")

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
QUANTIZED_CACHES = ("fp8", "fp8_e4m3")


def cache_config_for(
    kv_cache_dtype: str, chosen: AttentionConfig | None, engine_dtype: str, flag: str = "--kv-cache-dtype fp8"
) -> AttentionConfig:
    """Numerics of a layer with this cache dtype, given ZYFA_CONFIG. Raises ConfigError where they contradict.

    engine_dtype: the cache dtype of the engine, from which vLLM's --kv-cache-dtype-skip-layers excepts single layers.
    flag: what a user of this engine adds for a cache of one byte a value.
    """
    if kv_cache_dtype not in QUANTIZED_CACHES and engine_dtype in QUANTIZED_CACHES:
        return UNQUANTIZED
    if kv_cache_dtype in QUANTIZED_CACHES:
        config = chosen or LEAN
        if "none" in (config.qk_format, config.v_format):
            raise ConfigError(
                f"--kv-cache-dtype {kv_cache_dtype} holds one byte a value, ZYFA_CONFIG asks for "
                f"qk_format={config.qk_format}, v_format={config.v_format}; choose a quantised preset or drop the flag"
            )
        return config
    if chosen is not None and chosen.quantized:
        raise ConfigError(
            f"ZYFA_CONFIG quantises K and V, --kv-cache-dtype {kv_cache_dtype} does not; "
            f"add {flag} or set ZYFA_CONFIG=unquantized"
        )
    return chosen or UNQUANTIZED


def new_store(config: AttentionConfig, ranks: Mapping[str, int]) -> ScaleStore:
    """A scale store as the ZYFA_* switches say. Raises ConfigError, also where a file can't hold what `ranks` split.

    ranks: kind of parallelism -> number of processes that share the layers or heads of one engine.
    """
    chosen = settings.load()
    total = 1
    for count in ranks.values():
        total *= count
    if total > 1 and config.quantized and (chosen.scales or chosen.save_scales):
        detail = ", ".join(f"{kind} {count}" for kind, count in ranks.items())
        raise ConfigError(
            f"ZYFA_SCALES and ZYFA_SAVE_SCALES hold the heads of one process; this engine has {total} ({detail})"
        )
    return ScaleStore(config, chosen.scales, chosen.save_scales, chosen.headroom)


def announce(line: str) -> None:
    """Log one line per layer type, and keep the counters' file where ZYFA_STATS says."""
    _log_once(line)
    if directory := settings.load().stats:
        dispatch.counters.write_to(directory)


@functools.cache
def _log_once(line: str) -> None:
    logger.info(line)


def report_saturation(name: str, lost: int, values: int | None = None) -> None:
    """Count values that the cache's range cut off, and warn whenever their total passes a power of ten.

    values: out of how many, where that is known.
    """
    total = dispatch.counters.event("saturated values", lost)
    if len(str(total)) > len(str(total - lost)) or total == lost:
        logger.warning(
            "ZYFA: %d%s K and V values of %s saturated, %d since the start; "
            "calibrate on longer text or raise ZYFA_HEADROOM",
            lost, "" if values is None else f" of {values}", name, total,
        )
