"""Served prompts: time to first token and prefill tokens per second of `vllm serve` with dummy weights."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from zyfa_backend.compare.variants import BASELINE, KNOWN, Variant, VariantError, parse_definition

from .errors import BenchError
from .presets import Preset
from .servers import Contender, Settings, Share, Timed

VARIANTS = {
    BASELINE: Variant(BASELINE, what="the engine's own attention in bf16"),
    "engine-fp8": Variant("engine-fp8", {}, ("--kv-cache-dtype", "fp8"), what="the engine's own attention, fp8 cache"),
    **{name: variant for name, variant in KNOWN.items() if variant.uses_zyfa},
}
DEFAULT = (BASELINE, "engine-fp8", "lean")


def select(names: list[str], defined: list[str]) -> list[Variant]:
    """The servers to compare, baseline first. defined: NAME=LINE as for `zyfa compare --define`. Raises BenchError."""
    try:
        own = {variant.name: variant for variant in map(parse_definition, defined)}
    except VariantError as error:
        raise BenchError(str(error)) from None
    pool = {**VARIANTS, **own}
    unknown = [name for name in names if name not in pool]
    if unknown:
        raise BenchError(f"serving variants {', '.join(unknown)} are not known; choose from {', '.join(pool)}")
    return [pool[name] for name in dict.fromkeys([BASELINE, *(names or [*DEFAULT, *own])])]


def lengths(preset: Preset, prompts: tuple[int, ...]) -> list[int]:
    """The prompt lengths that fit beside one generated token; a length of the whole context is one token shorter."""
    fitting = [min(length, preset.context - 1) for length in prompts if length <= preset.context]
    if not fitting:
        raise BenchError(f"prompts of {', '.join(map(str, prompts))} tokens do not fit into {preset.context}")
    return fitting


def measure(
    preset: Preset,
    variants: list[Variant],
    settings: Settings,
    note: Callable[[str], None],
    skipped: list[dict[str, str]],
    sampler: Any = None,
    logs: Path | None = None,
) -> list[dict[str, Any]]:
    """Rows for every variant and prompt length of one model.

    A variant whose server fails is noted in `skipped`; without the baseline there is nothing to compare: ServerError,
    or the rows of the rounds before.
    logs: folder that keeps the servers' logs. Raises BenchError when the GPU does not hold all servers together.
    """
    chosen = lengths(preset, settings.prompts)
    timed: dict[str, dict[int, Timed]] = {}
    facts: dict[str, dict[str, Any]] = {}
    share = Share.of(preset, len(variants), settings.args) if settings.together else None

    def skip(contender: Contender) -> None:
        reason = str(contender.error)
        skipped.append({"kernel": contender.variant.name, "shape": preset.name, "reason": reason})
        note(reason)

    with tempfile.TemporaryDirectory(prefix="zyfa-bench-") as scratch:
        model = preset.write(Path(scratch) / preset.name)
        for _ in range(settings.server_rounds):
            failed = {entry["kernel"] for entry in skipped if entry["shape"] == preset.name}
            left = [variant for variant in variants if variant.name not in failed]
            for group in [left] if settings.together else [[variant] for variant in left]:
                note(f"serving {preset.name}: {', '.join(variant.name for variant in group)}")
                contenders = [Contender(preset, model, variant, max(chosen) + 1, settings, share) for variant in group]
                _serve(contenders, preset, settings, chosen, sampler, logs)
                baseline = next((one for one in contenders if one.variant.name == BASELINE), None)
                if baseline is not None and baseline.error is not None:
                    if BASELINE not in timed:
                        raise baseline.error
                    skip(baseline)  # earlier rounds stand
                    return rows(preset.name, timed, facts)
                for contender in contenders:
                    if contender.error is None:
                        _merge(contender, timed, facts)
                    else:
                        timed.pop(contender.variant.name, None)
                        skip(contender)
    return rows(preset.name, timed, facts)


def _merge(contender: Contender, timed: dict[str, dict[int, Timed]], facts: dict[str, dict[str, Any]]) -> None:
    """Adds what a round measured to the rounds before."""
    collected = timed.setdefault(contender.variant.name, {length: Timed(length) for length in contender.timed})
    for length, result in contender.timed.items():
        collected[length].ttft_s += result.ttft_s
        collected[length].tokens_per_s += result.tokens_per_s
    facts[contender.variant.name] = contender.facts


def _serve(
    contenders: list[Contender],
    preset: Preset,
    settings: Settings,
    chosen: list[int],
    sampler: Any,
    logs: Path | None,
) -> None:
    """Starts the servers at once, asks them, ends them. What fails is in their `error`."""
    # The servers end with the threads that started them, so these stay until the last has answered.
    with ThreadPoolExecutor(len(contenders)) as threads:
        try:
            list(threads.map(Contender.start, contenders))
            begin = time.time()
            _ask(contenders, preset, settings, chosen)
            end = time.time()
        finally:
            hurried = sys.exc_info()[0] is not None
            with ThreadPoolExecutor(len(contenders)) as stoppers:
                list(stoppers.map(lambda one: one.stop(hurried, logs), contenders))
    clocks = sampler.between(begin, end) if sampler is not None else None
    for one in contenders:
        if one.error is None:
            one.finish(clocks)


def _ask(contenders: list[Contender], preset: Preset, settings: Settings, chosen: list[int]) -> None:
    random = np.random.default_rng(settings.seed)

    def prompt(length: int) -> list[int]:
        return random.integers(0, preset.vocabulary, length).tolist()

    def alive(first: int) -> Iterator[Contender]:
        """Those that answer, beginning with another one each time; none without the baseline, if it is among them."""
        first %= len(contenders)
        for one in contenders[first:] + contenders[:first]:
            if any(other.error is not None and other.variant.name == BASELINE for other in contenders):
                return
            if one.error is None:
                yield one

    for length in chosen:
        for one in alive(0):
            one.timed[length] = Timed(length)
            one.ask(prompt(length), keep=False)  # compilation and allocation of this length are not timed
        for round_ in range(settings.repeats):
            ids = prompt(length)
            for one in alive(round_):
                one.ask(ids, keep=True)
        for round_ in range(settings.repeats):
            many = [prompt(length) for _ in range(settings.concurrency)]
            for one in alive(round_):
                one.ask_many(many)


def rows(model: str, timed: dict[str, dict[int, Timed]], facts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a variant and length; ratio_to: how many times as fast its first token comes as another variant's."""
    out = []
    for name, lengths_ in timed.items():
        for length, result in lengths_.items():
            ttft = statistics.median(result.ttft_s)
            others = {other: statistics.median(them[length].ttft_s) for other, them in timed.items() if other != name}
            rate = statistics.median(result.tokens_per_s)
            base = timed[BASELINE][length]
            out.append(
                {
                    "part": "serving",
                    "kernel": name,
                    "shape": f"{model} prompt {length}",
                    "tflops": None,
                    "ttft_s": ttft,
                    "ttft_s_all": result.ttft_s,
                    "ttft_over_baseline": ttft / statistics.median(base.ttft_s),
                    "prefill_tokens_s": rate,
                    "prefill_tokens_s_all": result.tokens_per_s,
                    "prefill_over_baseline": rate / statistics.median(base.tokens_per_s),
                    "ratio_to": {other: value / ttft for other, value in others.items()},
                    **facts[name],
                }
            )
    return out
