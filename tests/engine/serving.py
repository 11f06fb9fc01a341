"""Starts real vLLM servers for the engine tests and asks them over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from zyfa_backend.compare.server import Server, free_port, server_environment, vllm_executable

ZYFA = {"VLLM_ATTENTION_BACKEND": "ZYFA"}
FP8 = ("--kv-cache-dtype", "fp8")
# One process a server: the engine runs inside the API server, which halves the start-up on two cores.
SINGLE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass
class Answer:
    """One completion: token ids, their log-probabilities, and those of the prompt's tokens where asked for."""

    tokens: list[int]
    logprobs: list[float]
    top: list[dict[str, float]]
    prompt_logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass
class Engine:
    """A running server, where its kernel counters go, and its log."""

    url: str
    stats: Path
    server: Server
    # One for all threads: making a client takes longer than a tiny model needs for an answer.
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=300))

    @property
    def log(self) -> str:
        return self.server.log_text()

    def post(self, path: str, body: dict[str, Any], timeout: float = 300) -> Any:
        answer = self.client.post(self.url + path, json=body, timeout=timeout)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:2000]}\n{self.log[-3000:]}"
        return answer.json()

    def complete(self, ids: list[int], max_tokens: int = 16, prompt_logprobs: bool = False, **extra: Any) -> Answer:
        """Greedy completion of token ids."""
        body: dict[str, Any] = {
            "model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2,
            "return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True, **extra,
        }
        if prompt_logprobs:
            body["prompt_logprobs"] = 0
        return parse(self.post("/v1/completions", body), ids)

    def server_post(self, body: dict[str, Any]) -> int:
        """HTTP status of a completion whose answer does not matter."""
        return httpx.post(self.url + "/v1/completions", json=body, timeout=300).status_code

    def metric(self, name: str) -> float:
        """Sum of a Prometheus counter of the server."""
        lines = httpx.get(self.url + "/metrics", timeout=30).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def parse(document: dict[str, Any], ids: list[int]) -> Answer:
    choice = document["choices"][0]
    listed = choice.get("prompt_logprobs") or []
    scored = [entry[str(token)]["logprob"] for entry, token in zip(listed[1:], ids[1:], strict=False)]
    details = document["usage"].get("prompt_tokens_details") or {}
    logprobs = choice["logprobs"]
    return Answer(
        choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], scored,
        details.get("cached_tokens") or 0,
    )


@contextlib.contextmanager
def serve(
    model: Path,
    folder: Path,
    *args: str,
    env: dict[str, str] | None = None,
    name: str = "server",
    eager: bool = True,
) -> Iterator[Engine]:
    """A `vllm serve` of `model` with `args` and `env`; its log and counters lie under `folder`/`name`."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        vllm_executable(), "serve", str(model), "--port", str(port), "--host", "127.0.0.1",
        "--served-model-name", "m", "--enable-prompt-tokens-details", *args,
    ]
    if eager:
        command.append("--enforce-eager")
    if "--max-model-len" not in args:
        command += ["--max-model-len", "2048"]
    overrides = {"ZYFA_STATS": str(place / "stats"), **SINGLE_PROCESS, **(env or {})}
    environment = server_environment(str(model), overrides, os.environ)
    with Server(command, environment, place / "log", f"http://127.0.0.1:{port}", 300) as server:
        yield Engine(f"http://127.0.0.1:{port}", place / "stats", server)


def counters(stats: Path) -> dict[str, dict[str, int]]:
    """Kernel counters of a server that has ended, summed over its processes."""
    total: dict[str, dict[str, int]] = {}
    for path in stats.glob("stats-*.json"):
        for kernel, counts in json.loads(path.read_text())["kernels"].items():
            entry = total.setdefault(kernel, {"calls": 0, "tokens": 0})
            entry["calls"] += counts["calls"]
            entry["tokens"] += counts["tokens"]
    return total


def text_prompts(model: Path, lengths: tuple[int, ...]) -> list[list[int]]:
    """Token ids of the shipped text, one piece after another."""
    from transformers import AutoTokenizer

    from zyfa_backend.compare.text import default_text

    ids = AutoTokenizer.from_pretrained(model)(default_text()[: 12 * sum(lengths)]).input_ids
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def ragged_prompts(vocabulary: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random token ids of the given lengths; ids below 10 are left to special tokens."""
    import random

    source = random.Random(seed)
    return [[source.randrange(10, vocabulary) for _ in range(length)] for length in lengths]
