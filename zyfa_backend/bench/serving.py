"""Served prompts: time to first token and prefill tokens per second of `vllm serve` with dummy weights."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
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
# Of servers that run together: the share of the GPU's free memory that they take, and of each what is neither weights
# nor KV cache (CUDA's context, activations, graphs).
USED_MEMORY, OTHER_BYTES = 0.9, 8 << 30
MEMORY_ARGUMENTS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")


@dataclass(frozen=True)
class Settings:
    """prompts: lengths in tokens; each is sent `repeats` times alone, then `concurrency` prompts at once, `repeats`
    times. server_rounds: how often the variants are served in turn. together: all servers run side by side, and each
    prompt goes to one after the other; they share the GPU's memory."""

    prompts: tuple[int, ...] = (2048, 8192, 32768)
    repeats: int = 5
    concurrency: int = 4
    server_rounds: int = 1
    together: bool = False
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

    A variant whose server fails is noted in `skipped`; without the baseline there is nothing to compare: ServerError,
    or the rows of the rounds before.
    logs: folder that keeps the servers' logs. Raises BenchError when the GPU does not hold all servers together.
    """
    chosen = lengths(preset, settings.prompts)
    timed: dict[str, dict[int, Timed]] = {}
    facts: dict[str, dict[str, Any]] = {}
    share = Share.of(preset, len(variants), settings.args) if settings.together else None

    def skip(contender: _Contender) -> None:
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
                contenders = [_Contender(preset, model, variant, max(chosen) + 1, settings, share) for variant in group]
                _serve(contenders, preset, settings, chosen, sampler, logs)
                baseline = next((one for one in contenders if one.variant.name == BASELINE), None)
                if baseline is not None and baseline.error is not None:
                    if BASELINE not in timed:
                        raise baseline.error
                    skip(baseline)  # earlier rounds stand
                    return rows(preset.name, timed, facts)
                for contender in contenders:
                    name = contender.variant.name
                    if contender.error is not None:
                        timed.pop(name, None)
                        skip(contender)
                        continue
                    collected = timed.setdefault(name, {length: Timed(length) for length in chosen})
                    for length, result in contender.timed.items():
                        collected[length].ttft_s += result.ttft_s
                        collected[length].tokens_per_s += result.tokens_per_s
                    facts[name] = contender.facts
    return rows(preset.name, timed, facts)


@dataclass(frozen=True)
class Share:
    """One server's part of a GPU that several share: a share of its memory, and bytes of KV cache.

    Given the bytes, the engine doesn't measure what is free, which changes while the others start. The share it
    checks all the same.
    """

    memory: float
    cache_bytes: int

    @classmethod
    def of(cls, preset: Preset, servers: int, given: tuple[str, ...] = ()) -> Share | None:
        """None where the user's own arguments, `given`, say how much memory a server takes.

        Raises BenchError when what is free on the GPU does not hold so many servers with their weights.
        """
        import torch

        if any(argument.split("=")[0] in MEMORY_ARGUMENTS for argument in given):
            return None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        cache_bytes = int(free * USED_MEMORY / servers) - 2 * preset.parameters - OTHER_BYTES
        if cache_bytes <= 0:
            raise BenchError(
                f"{free / 2**30:.0f} GiB of free GPU memory do not hold {servers} servers of {preset.name} together "
                f"({2 * preset.parameters / 2**30:.0f} GiB of weights and {OTHER_BYTES >> 30} GiB beside each); choose "
                "fewer with --serve, or leave out --together"
            )
        return cls(free * USED_MEMORY / servers / total, cache_bytes)

    @property
    def arguments(self) -> list[str]:
        values = (str(self.cache_bytes), f"{self.memory:.3f}")
        return [word for pair in zip(MEMORY_ARGUMENTS, values, strict=True) for word in pair]


class _Contender:
    """One variant's server and what was measured on it. `error`: why there is nothing, if so."""

    def __init__(
        self, preset: Preset, model: Path, variant: Variant, length: int, settings: Settings, share: Share | None
    ) -> None:
        self.variant = variant
        self.timed: dict[int, Timed] = {}
        self.facts: dict[str, Any] = {}
        self.error: ServerError | None = None
        self._folder = Path(tempfile.mkdtemp(prefix=f"{variant.name}-", dir=model.parent))
        self._log_name = f"{preset.name}-{variant.name}.log"
        env = server_environment(str(model), variant.env, os.environ)
        if variant.uses_zyfa:
            env["ZYFA_STATS"] = str(self._folder)
        port = free_port()
        self.server = Server(
            command(model, variant, length, settings, port, share),
            env,
            self._folder / "server.log",
            f"http://127.0.0.1:{port}",
            settings.startup_timeout_s,
        )
        self.client = Client(self.server.url, settings.request_timeout_s, seed=settings.seed)

    def start(self) -> None:
        try:
            self.server.__enter__()
        except ServerError as error:
            self.error = error

    def ask(self, ids: list[int], keep: bool) -> None:
        """Seconds to the first token of one prompt."""
        try:
            seconds = self.client.generate(ids, 1).ttft_s
        except ClientError as error:
            self._fail(error)
        else:
            if keep:
                self.timed[len(ids)].ttft_s.append(seconds)

    def ask_many(self, prompts: list[list[int]]) -> None:
        """Prompt tokens per second of some prompts of one length at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            begin = time.perf_counter()
            try:
                for done in as_completed([pool.submit(self.client.generate, ids, 1) for ids in prompts]):
                    done.result()
            except ClientError as error:
                self._fail(error)
            except BaseException:
                self.server.stop(in_order=False)  # which ends the prompts that the pool would wait for
                raise
            else:
                tokens = sum(map(len, prompts))
                self.timed[len(prompts[0])].tokens_per_s.append(tokens / (time.perf_counter() - begin))

    def _fail(self, error: ClientError) -> None:
        """Ends the server at once: what it still computes would slow the others."""
        self.error = self.server.failed(str(error))
        self.server.stop(in_order=False)

    def stop(self, hurried: bool, logs: Path | None) -> None:
        self.server.stop(in_order=not hurried)
        self.client.__exit__(None, None, None)
        if logs is not None and self.server.log.exists():
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.server.log, logs / self._log_name)

    def finish(self, clocks: Any) -> None:
        """What the server ran, once it has ended."""
        kernels = read_kernels(self._folder)
        if self.variant.uses_zyfa and not kernels:
            self.error = ServerError(
                f"the server of {self.variant.name} ran no ZYFA kernel: is zyfa installed in the environment of "
                f"{self.server.command[0]}? `zyfa doctor` tells"
            )
        self.facts = {
            "ran": " + ".join(kernels) if kernels else attention_backend(self.server.log_text()),
            "command": self.server.shell_line(),
            "clocks": clocks,
        }


def _serve(
    contenders: list[_Contender],
    preset: Preset,
    settings: Settings,
    chosen: list[int],
    sampler: Any,
    logs: Path | None,
) -> None:
    """Starts the servers at once, asks them, ends them. What fails is in their `error`."""
    begin = time.time()
    # The servers end with the threads that started them, so these stay until the last has answered.
    with ThreadPoolExecutor(len(contenders)) as threads:
        try:
            list(threads.map(_Contender.start, contenders))
            _ask(contenders, preset, settings, chosen)
        finally:
            hurried = sys.exc_info()[0] is not None
            with ThreadPoolExecutor(len(contenders)) as stoppers:
                list(stoppers.map(lambda one: one.stop(hurried, logs), contenders))
    clocks = sampler.between(begin, time.time()) if sampler is not None else None
    for one in contenders:
        if one.error is None:
            one.finish(clocks)


def command(
    model: Path, variant: Variant, length: int, settings: Settings, port: int, share: Share | None = None
) -> list[str]:
    """The server's command; the user's arguments come last, so that they win."""
    return [
        *(vllm_executable(), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
        # Prompts are token ids: a checkpoint of facts has no tokenizer.
        *("--load-format", "dummy", "--skip-tokenizer-init", "--seed", str(settings.seed)),
        *("--max-model-len", str(length), "--no-enable-prefix-caching"),
        *(["--enforce-eager"] if is_cpu_build() else []),
        *(share.arguments if share is not None else []),
        *variant.args,
        *settings.args,
    ]


def _ask(contenders: list[_Contender], preset: Preset, settings: Settings, chosen: list[int]) -> None:
    random = np.random.default_rng(settings.seed)

    def prompt(length: int) -> list[int]:
        return random.integers(0, preset.vocabulary, length).tolist()

    def alive(first: int) -> Iterator[_Contender]:
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
