"""A server of the serving part: its command, its share of a GPU, and what is measured on it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from zyfa_backend.compare.variants import Variant

from .errors import BenchError
from .presets import Preset

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


class Contender:
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
