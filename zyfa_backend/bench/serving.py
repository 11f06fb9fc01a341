"""Served prompts: time to first token and prefill tokens per second of `vllm serve` with dummy weights."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zyfa_backend.compare.client import Client, ClientError
from zyfa_backend.compare.engines import is_cpu_build
from zyfa_backend.compare.runner import read_kernels
from zyfa_backend.compare.server import (
    Server,
    ServerError,
    attention_backend,
    free_port,
    server_environment,
    vllm_executable,
)
from zyfa_backend.compare.variants import BASELINE, KNOWN, Variant, VariantError, parse_definition

from .errors import BenchError
from .presets import Preset

VARIANTS = {
    BASELINE: Variant(BASELINE, what="the engine's own attention in bf16"),
    "engine-fp8": Variant("engine-fp8", {}, ("--kv-cache-dtype", "fp8"), what="the engine's own attention, fp8 cache"),
    **{name: variant for name, variant in KNOWN.items() if variant.uses_zyfa},
}
DEFAULT = (BASELINE, "engine-fp8", "lean")


@dataclass(frozen=True)
class Settings:
    """prompts: lengths in tokens; each is sent `repeats` times alone, then `concurrency` prompts at once, `repeats`
    times. server_rounds: how often the variants are served in turn."""

    prompts: tuple[int, ...] = (2048, 8192, 32768)
    repeats: int = 5
    concurrency: int = 4
    server_rounds: int = 1
    args: tuple[str, ...] = ()
    startup_timeout_s: float = 1200.0
    request_timeout_s: float = 600.0
    seed: int = 0


@dataclass
class Timed:
    """Of one variant and prompt length: seconds to the first token alone, and tokens per second of many at once."""

    tokens: int
    ttft_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


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

    A variant whose server fails is noted in `skipped`; without the baseline there is nothing to compare: ServerError.
    logs: folder that keeps the servers' logs.
    """
    chosen = lengths(preset, settings.prompts)
    timed: dict[str, dict[int, Timed]] = {}
    facts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="zyfa-bench-") as scratch:
        model = preset.write(Path(scratch) / preset.name)
        for _ in range(settings.server_rounds):
            for variant in variants:
                if variant.name in {entry["kernel"] for entry in skipped if entry["shape"] == preset.name}:
                    continue
                note(f"serving {preset.name}: {variant.name}")
                collected = timed.setdefault(variant.name, {length: Timed(length) for length in chosen})
                try:
                    facts[variant.name] = _serve(preset, model, variant, settings, collected, sampler, logs)
                except (ServerError, ClientError) as error:
                    if variant.name == BASELINE:
                        raise
                    timed.pop(variant.name)
                    reason = str(error)
                    skipped.append({"kernel": variant.name, "shape": preset.name, "reason": reason})
                    note(reason)
    return rows(preset.name, timed, facts)


def _serve(
    preset: Preset,
    model: Path,
    variant: Variant,
    settings: Settings,
    timed: dict[int, Timed],
    sampler: Any,
    logs: Path | None,
) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"{variant.name}-", dir=model.parent))
    env = server_environment(str(model), variant.env, os.environ)
    if variant.uses_zyfa:
        env["ZYFA_STATS"] = str(folder)
    port = free_port()
    server = Server(
        command(model, variant, max(timed) + 1, settings, port),
        env,
        folder / "server.log",
        f"http://127.0.0.1:{port}",
        settings.startup_timeout_s,
    )
    begin = time.time()
    try:
        with server:
            with Client(server.url, settings.request_timeout_s, seed=settings.seed) as client:
                try:
                    _ask(client, preset, settings, timed)
                except ClientError as error:
                    raise server.failed(str(error)) from error
    finally:
        if logs is not None and server.log.exists():
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(server.log, logs / f"{preset.name}-{variant.name}.log")
    kernels = read_kernels(folder)
    if variant.uses_zyfa and not kernels:
        raise ServerError(
            f"the server of {variant.name} ran no ZYFA kernel: is zyfa installed in the environment of "
            f"{server.command[0]}? `zyfa doctor` tells"
        )
    return {
        "ran": " + ".join(kernels) if kernels else attention_backend(server.log_text()),
        "command": server.shell_line(),
        "clocks": sampler.between(begin, time.time()) if sampler is not None else None,
    }


def command(model: Path, variant: Variant, length: int, settings: Settings, port: int) -> list[str]:
    """The server's command; the user's arguments come last, so that they win."""
    return [
        *(vllm_executable(), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
        # Prompts are token ids: a checkpoint of facts has no tokenizer.
        *("--load-format", "dummy", "--skip-tokenizer-init", "--seed", str(settings.seed)),
        *("--max-model-len", str(length), "--no-enable-prefix-caching"),
        *(["--enforce-eager"] if is_cpu_build() else []),
        *variant.args,
        *settings.args,
    ]


def _ask(client: Client, preset: Preset, settings: Settings, timed: dict[int, Timed]) -> None:
    random = np.random.default_rng(settings.seed)

    def prompt(length: int) -> list[int]:
        return random.integers(0, preset.vocabulary, length).tolist()

    with ThreadPoolExecutor(settings.concurrency) as pool:
        for length, result in timed.items():
            client.generate(prompt(length), 1)  # compilation and allocation of this length are not timed
            result.ttft_s += [client.generate(prompt(length), 1).ttft_s for _ in range(settings.repeats)]
            for _ in range(settings.repeats):
                prompts = [prompt(length) for _ in range(settings.concurrency)]
                begin = time.perf_counter()
                list(pool.map(lambda one: client.generate(one, 1), prompts))
                seconds = time.perf_counter() - begin
                result.tokens_per_s.append(settings.concurrency * length / seconds)


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
