"""Runs the variants one after another and collects what their servers say about the same tokens."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import state
from .client import Client, ClientError
from .engines import VLLM, Engine
from .server import Server, ServerError, free_port, require_free, server_environment
from .state import Measurement, Store
from .text import Plan, TextError, cut_prompts, cut_windows
from .variants import BASELINE, NOISE, Variant

DEFAULT_CONTEXT = 2048
DEFAULT_TOKENS = 8192


class RunError(RuntimeError):
    """A run cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """What is asked of every server. None: as much as the default and the model or the text allow."""

    tokens: int | None = None
    context: int | None = None
    top_k: int = 200
    prompts: int = 16
    prompt_tokens: int | None = None
    max_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class ServerOptions:
    args: tuple[str, ...] = ()
    port: int | None = None
    startup_timeout_s: float = 1200.0
    request_timeout_s: float = 600.0


@dataclass
class Outcome:
    """plan and measurements of the finished variants, in order; variants: as they ran; failures: name -> message."""

    plan: Plan
    variants: dict[str, Variant] = field(default_factory=dict)
    measurements: dict[str, Measurement] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


class Progress(Protocol):
    """What the run tells while it goes on."""

    def variant(self, name: str, index: int, count: int) -> None: ...

    def step(self, what: str, done: int, total: int) -> None: ...

    def note(self, message: str) -> None: ...


@dataclass
class Run:
    """One comparison. Raises RunError, ServerError, ClientError or TextError when there is nothing to compare with.

    A variant other than the baseline that fails is noted in Outcome.failures and the others still run.
    """

    model: str
    variants: list[Variant]
    text: str
    settings: Settings
    options: ServerOptions
    store: Store
    progress: Progress
    engine: Engine = VLLM
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        self.key = state.digest(
            {
                "format": state.FORMAT,
                "engine": self.engine.name,
                "model": state.model_identity(self.model),
                "text": state.digest(self.text),
                "settings": asdict(self.settings),
                "versions": state.versions(),
            }
        )
        self.plan = self.store.load_plan(self.key)

    def execute(self, fresh: bool = False) -> Outcome:
        with _locked(self.store.directory):
            if fresh:
                self.store.clear()
                self.plan = None
            outcome: Outcome | None = None
            failures: dict[str, str] = {}
            for index, variant in enumerate(self.variants):
                self.progress.variant(variant.name, index, len(self.variants))
                first: Measurement | None = None
                if variant is self.engine.variants(self.model)[NOISE]:
                    assert outcome is not None
                    first = outcome.measurements[BASELINE]
                    variant = self.engine.second_baseline(first.platform, first.kernel)
                try:
                    measurement, reused = self._measured(variant)
                    if first is not None and not variant.uses_zyfa and measurement.kernel == first.kernel:
                        raise RunError(
                            f"{first.kernel} served it as it served the baseline, which shows no noise; "
                            "a --server-arg that chooses the attention backend wins over the variant's own"
                        )
                except (ServerError, ClientError, RunError) as error:
                    if variant.name == BASELINE:
                        raise
                    failures[variant.name] = str(error)
                    self.progress.note(f"{variant.name}: {error}")
                    continue
                assert self.plan is not None
                outcome = outcome or Outcome(self.plan)
                outcome.variants[variant.name] = variant
                outcome.measurements[variant.name] = measurement
                if reused:
                    outcome.reused.append(variant.name)
            assert outcome is not None
            outcome.failures = failures
            return outcome

    def _measured(self, variant: Variant) -> tuple[Measurement, bool]:
        about: dict[str, Any] = {"args": list(self.options.args)}
        if variant.url:
            with self.engine.client(variant.url, timeout_s=10, api_key=self.environ.get("OPENAI_API_KEY")) as client:
                about = {"version": client.version(), "model": client.model}
        key = state.variant_key(self.key, variant, self.environ, about)
        if self.plan is not None and (stored := self.store.load(variant.name, key)):
            self.progress.note(f"{variant.name}: kept from an earlier run with the same settings")
            return stored, True
        measurement = self._ask_running(variant) if variant.url else self._serve_and_ask(variant)
        self.store.save(variant.name, key, measurement)
        return measurement, False

    def _ask_running(self, variant: Variant) -> Measurement:
        assert variant.url is not None
        start = time.monotonic()
        with self._client(variant.url) as client:
            answers = self._ask(client)
        return Measurement(
            **answers,
            kernel="unknown (running server)",
            kernels={},
            platform="unknown",
            command=f"running server at {variant.url}",
            seconds=time.monotonic() - start,
        )

    def _serve_and_ask(self, variant: Variant) -> Measurement:
        start = time.monotonic()
        folder = self.store.folder(variant.name)
        stats = folder / "stats"
        shutil.rmtree(stats, ignore_errors=True)
        env = server_environment(self.model, variant.env, self.environ, self.engine.environment())
        if variant.uses_zyfa:
            stats.mkdir()
            env["ZYFA_STATS"] = str(stats.resolve())
        if self.options.port is not None:
            port = self.options.port
            require_free(port)
        else:
            port = free_port()
        server = Server(
            self.engine.command(self.model, variant, self.options.args, port, self.settings.top_k, self.settings.seed),
            env,
            folder / "server.log",
            f"http://127.0.0.1:{port}",
            self.options.startup_timeout_s,
        )
        self.progress.step("starting the server", 0, 1)
        with server:
            self.progress.note(f"{variant.name}: server {server.pid} is ready after {time.monotonic() - start:.0f} s")
            try:
                with self._client(server.url) as client:
                    answers = self._ask(client)
            except ClientError as error:
                raise server.failed(str(error)) from error
            command = server.shell_line()
            self.progress.step("stopping the server", 1, 1)
        log = server.log_text()
        kernels = read_kernels(stats)
        if variant.uses_zyfa and not kernels:
            raise RunError(
                f"the server ran no ZYFA kernel (it wrote no counters to {stats}): is zyfa installed in the "
                f"environment of {server.command[0]}? `zyfa doctor` tells\n  command: {command}"
            )
        return Measurement(
            **answers,
            kernel=" + ".join(kernels) if kernels else self.engine.attention_backend(log),
            kernels=kernels,
            platform=self.engine.platform_of(log),
            command=command,
            seconds=time.monotonic() - start,
        )

    def _client(self, url: str) -> Client:
        key = self.environ.get("OPENAI_API_KEY")
        return self.engine.client(url, self.options.request_timeout_s, api_key=key, seed=self.settings.seed)

    def _ask(self, client: Client) -> dict[str, Any]:
        if self.plan is None:
            self.plan = make_plan(client, self.text, self.settings, self.progress.note)
            self.store.save_plan(self.key, self.plan)
        plan, settings = self.plan, self.settings
        needed = max(
            max(len(window) for window in plan.windows) + 1,
            max((len(prompt) for prompt in plan.prompts), default=0) + settings.max_tokens,
        )
        if client.max_model_len < needed:
            raise ClientError(
                f"{client.url} serves {client.max_model_len} tokens of context, {needed} are needed; give the server "
                f"more cache memory or ask for less with --context, --prompt-tokens or --max-tokens"
            )
        total = len(plan.windows) + len(plan.prompts)
        scores = []
        for index, window in enumerate(plan.windows):
            self.progress.step(f"window {index + 1} of {len(plan.windows)}", index, total)
            scores.append(client.score(window, settings.top_k))
        continuations, ttft = [], []
        if plan.prompts:
            # Discarded: the first request of a kind pays for compilation and allocation.
            client.generate(plan.windows[0][: len(plan.prompts[0])], min(4, settings.max_tokens))
        for index, prompt in enumerate(plan.prompts):
            self.progress.step(f"prompt {index + 1} of {len(plan.prompts)}", len(plan.windows) + index, total)
            continuation = client.generate(prompt, settings.max_tokens)
            continuations.append(continuation.token_ids)
            ttft.append(continuation.ttft_s)
        return {
            "scores": scores,
            "continuations": np.array(continuations, dtype=np.int32).reshape(-1, settings.max_tokens),
            "ttft_s": np.array(ttft, dtype=np.float64),
            "engine_version": client.version(),
            "max_model_len": client.max_model_len,
        }


def make_plan(client: Client, text: str, settings: Settings, note: Any = lambda message: None) -> Plan:
    """Cuts the text into windows and prompts with the server's own tokenizer. Raises TextError."""
    limit = client.max_model_len
    longest = limit - 1  # the API generates at least one token
    context = settings.context or min(DEFAULT_CONTEXT, longest)
    if context > longest:
        raise TextError(
            f"--context {context} is too long; at most {longest}: of {limit} that the server takes, one is generated"
        )
    bos = client.bos()
    ids = client.tokenize(text, special=False)
    if settings.tokens is not None and settings.tokens > len(ids):
        raise TextError(f"--tokens {settings.tokens} is more than the text has ({len(ids)} tokens)")
    tokens = settings.tokens or DEFAULT_TOKENS
    if tokens > len(ids):
        note(f"the text has {len(ids)} tokens, all of which are scored")
    windows = cut_windows(ids, bos, tokens, context)
    prompt_tokens = settings.prompt_tokens or max(1, min(context // 2, limit - settings.max_tokens))
    if settings.prompts and prompt_tokens + settings.max_tokens > limit:
        raise TextError(
            f"--prompt-tokens {prompt_tokens} and --max-tokens {settings.max_tokens} are together more than the "
            f"{limit} tokens that the server takes"
        )
    prompts = cut_prompts(ids, bos, settings.prompts, prompt_tokens) if settings.prompts else []
    return Plan(windows, prompts, len(ids))


def read_kernels(stats: Path) -> dict[str, dict[str, int]]:
    """Which ZYFA kernels ran in the server's processes, busiest first: name -> {"calls", "tokens"}."""
    kernels: dict[str, dict[str, int]] = {}
    for path in sorted(stats.glob("stats-*.json")):
        for name, counts in json.loads(path.read_text(encoding="utf-8"))["kernels"].items():
            total = kernels.setdefault(name, {"calls": 0, "tokens": 0})
            for count in total:
                total[count] += counts[count]
    return dict(sorted(kernels.items(), key=lambda item: -item[1]["tokens"]))


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"another zyfa compare is at work in {directory}; give this one its own --out") from error
        yield
