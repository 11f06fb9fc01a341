"""From measurements to the numbers of the table, the JSON document and the report."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from . import metrics, state
from .metrics import Estimate, TopK
from .runner import Outcome, Run, Settings
from .state import Measurement
from .variants import BASELINE, NOISE

SCHEMA = 1


@dataclass(frozen=True)
class Series:
    """Per-token and per-prompt values behind a variant's numbers, for the plots. kl is None for the baseline."""

    kl: np.ndarray | None
    positions: np.ndarray
    survival: np.ndarray | None
    ttft_s: np.ndarray


def document(run: Run, outcome: Outcome, command: str, text_name: str) -> tuple[dict[str, Any], dict[str, Series]]:
    """The results as the JSON document of the command (see README) and the series to plot."""
    windows = [len(window) - 1 for window in outcome.plan.windows]
    blocks = metrics.blocks_of(windows)
    baseline = outcome.measurements[BASELINE]
    reference = TopK.concatenate(baseline.scores)
    rows: dict[str, dict[str, Any]] = {}
    series: dict[str, Series] = {}
    for name, measurement in outcome.measurements.items():
        scores = TopK.concatenate(measurement.scores)
        kl = None if name == BASELINE else metrics.coarse_kl(reference, scores)
        rows[name] = {
            "name": name,
            "kernel": measurement.kernel,
            "what": outcome.variants[name].what,
            **_token_numbers(kl, reference, scores, blocks, run.settings),
            **_prompt_numbers(baseline, measurement, run.settings.seed),
            "kernels": measurement.kernels,
            "unlisted_mass": float(metrics.unlisted_mass(scores).mean()),
            "engine": run.engine.title,
            "engine_version": measurement.engine_version,
            "max_model_len": measurement.max_model_len,
            "seconds": round(measurement.seconds, 1),
            "command": measurement.command,
        }
        survival = None
        if name != BASELINE and run.settings.prompts:
            divergence = metrics.first_divergence(baseline.continuations, measurement.continuations)
            survival = metrics.surviving(divergence, run.settings.max_tokens)
        positions = np.concatenate([np.arange(1, length + 1) for length in windows])
        series[name] = Series(kl, positions, survival, measurement.ttft_s)
    noise = _noise_band(rows.get(NOISE))
    for row in rows.values():
        over = row["kl"] / noise["upper"] if noise and noise["upper"] > 0 and row["name"] != BASELINE else None
        row["kl_over_noise"] = over
    return (
        {
            "schema": SCHEMA,
            "model": run.model,
            "command": command,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": state.versions(),
            "settings": {
                **asdict(run.settings),
                "tokens": sum(map(len, outcome.plan.windows)),
                "context": max(map(len, outcome.plan.windows)),
                "prompt_tokens": max(map(len, outcome.plan.prompts), default=0),
                "scored_tokens": outcome.plan.scored_tokens,
                "windows": len(outcome.plan.windows),
                "server_args": list(run.options.args),
            },
            "text": {"name": text_name, "tokens": outcome.plan.text_tokens, "sha256": state.digest(run.text)},
            "bootstrap": {
                "interval": "95% percentile",
                "resamples": metrics.RESAMPLES,
                "token_unit": f"blocks of {metrics.BLOCK_TOKENS} neighbouring tokens within a window",
                "token_blocks": int(blocks[-1]) + 1,
                "prompt_unit": "prompts",
            },
            "noise_band": noise,
            "variants": list(rows.values()),
            "failures": [{"name": name, "error": error} for name, error in outcome.failures.items()],
        },
        series,
    )


def _token_numbers(
    kl: np.ndarray | None, reference: TopK, scores: TopK, blocks: np.ndarray, settings: Settings
) -> dict[str, Any]:
    seed = settings.seed
    surprise = -scores.actual.astype(np.float64)
    extra = surprise + reference.actual.astype(np.float64)
    numbers: dict[str, Any] = {}
    if kl is None:
        numbers |= {"kl": 0.0, "kl_interval": [0.0, 0.0], "kl_median": 0.0, "kl_p99": 0.0, "kl_half_list": 0.0}
    else:
        half = max(1, settings.top_k // 2)
        coarser = metrics.coarse_kl(reference.truncated(half), scores.truncated(half))
        numbers |= _named("kl", metrics.mean_over_blocks(kl, blocks, seed=seed))
        numbers |= {"kl_median": float(np.median(kl)), "kl_p99": float(np.percentile(kl, 99))}
        numbers |= {"kl_half_list": float(coarser.mean())}  # how much the bound still grows with the list
    numbers |= _named("perplexity", metrics.mean_over_blocks(surprise, blocks, np.exp, seed))
    numbers |= _named("perplexity_ratio", metrics.mean_over_blocks(extra, blocks, np.exp, seed))
    same = metrics.same_most_likely(reference, scores).astype(np.float64)
    return numbers | _named("top1_agreement", metrics.mean_over_blocks(same, blocks, seed=seed))


def _prompt_numbers(baseline: Measurement, measurement: Measurement, seed: int) -> dict[str, Any]:
    names = ("token_agreement", "first_divergence", "ttft_s", "ttft_ratio")
    if len(measurement.ttft_s) == 0:
        return {key: None for name in names for key in (name, f"{name}_interval")} | {"never_diverged": None}
    ours, theirs = measurement.continuations, baseline.continuations
    divergence = metrics.first_divergence(theirs, ours)
    ratio = measurement.ttft_s / baseline.ttft_s
    return {
        **_named("token_agreement", metrics.over_prompts(metrics.agreement(theirs, ours), seed=seed)),
        **_named("first_divergence", metrics.over_prompts(divergence.astype(np.float64), seed=seed)),
        "never_diverged": float((divergence == ours.shape[1]).mean()),
        **_named("ttft_s", metrics.over_prompts(measurement.ttft_s, np.median, seed)),
        **_named("ttft_ratio", metrics.over_prompts(ratio, np.median, seed)),
    }


def _named(name: str, estimate: Estimate) -> dict[str, Any]:
    return {name: estimate.value, f"{name}_interval": [estimate.low, estimate.high]}


def _noise_band(row: dict[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    low, high = row["kl_interval"]
    return {"variant": NOISE, "kernel": row["kernel"], "kl": row["kl"], "lower": low, "upper": high}


def machine() -> dict[str, Any]:
    """What the servers ran on: processor, cores, memory, GPUs."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": gpus(),
        "python": platform.python_version(),
    }


def gpus() -> list[str]:
    """Names of the GPUs that torch sees, with the architecture where it is AMD's; [] without torch."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        found.append(f"{properties.name} {architecture}".strip())
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None
