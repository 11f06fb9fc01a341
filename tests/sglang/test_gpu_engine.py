"""SGLang's servers with ZYFA on a GPU: graphs, batches, pages, the radix cache, the engine's decode, MLA.

`pytest tests/sglang/test_gpu_engine.py --device cuda`. The engine's own backend is triton, which every GPU has.
"""

from __future__ import annotations

import os
import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.checkpoints import DEEPSEEK, checkpoint
from zyfa_backend.compare.engines import SGLANG
from zyfa_backend.compare.runner import read_kernels
from zyfa_backend.compare.server import Server, free_port, server_environment
from zyfa_backend.compare.sglang import SglangClient
from zyfa_backend.compare.variants import Variant

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.slow]

NEW_TOKENS = 16
LENGTHS = (300, 1, 17, 63, 64, 65, 129, 700, 1500)
SOURCE = random.Random(0)
PROMPTS = [[SOURCE.randrange(10, 490) for _ in range(length)] for length in LENGTHS]
# Servers run side by side, and tiny models need little.
SMALL = (
    "--max-total-tokens", "32768", "--mem-fraction-static", "0.4", "--max-running-requests", "16",
    "--cuda-graph-max-bs-decode", "8", "--cuda-graph-max-bs-prefill", "256", "--chunked-prefill-size", "512",
)  # fmt: skip
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
OWN, BOTH = ("--attention-backend", "triton"), ("--attention-backend", "zyfa", *FP8)
HYBRID = (*OWN, "--prefill-attention-backend", "zyfa", *FP8)
BOUND = 0.10  # mean |difference| of log-probabilities, as of vLLM's tests: FP8 against the engine's own in bf16


@pytest.fixture(autouse=True)
def on_a_gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU and --device cuda")


@dataclass(frozen=True)
class Answers:
    """Of each prompt alone, of all sent at once, and of one prompt sent twice that may share its cached prefix."""

    alone: list[dict[str, Any]]
    together: list[dict[str, Any]]
    twice: list[dict[str, Any]]
    kernels: dict[str, dict[str, int]]
    log: str


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def logprobs(answers: list[dict[str, Any]], of: str) -> list[list[float]]:
    """of: "input" or "output". The first token of a prompt has none."""
    skip = 1 if of == "input" else 0
    return [[entry[0] for entry in answer["meta_info"][f"{of}_token_logprobs"][skip:]] for answer in answers]


def difference(ours: Answers, theirs: Answers) -> float:
    pairs = zip(logprobs(ours.alone, "input"), logprobs(theirs.alone, "input"), strict=True)
    return statistics.fmean(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))


def ask(model: Path, folder: Path, name: str, args: tuple[str, ...]) -> Answers:
    port, place = free_port(), folder / name
    place.mkdir()
    command = SGLANG.command(str(model), Variant(name, args=args), SMALL, port, 1, 0)
    command.remove("--disable-radix-cache")
    env = server_environment(str(model), {"ZYFA_STATS": str(place / "stats")}, os.environ, SGLANG.environment())
    client = SglangClient(f"http://127.0.0.1:{port}", timeout_s=300)

    def one(ids: list[int], start: int = 0, **more: Any) -> dict[str, Any]:
        more |= {"return_logprob": True, "logprob_start_len": start}
        return client._request("POST", "/generate", client._generate_body(ids, NEW_TOKENS, **more))

    with Server(command, env, place / "log", client.url, 300) as server:
        one(PROMPTS[0])  # decides about the scales
        alone = [one(ids) for ids in PROMPTS]
        with ThreadPoolExecutor(len(LENGTHS)) as pool:
            together = list(pool.map(one, PROMPTS))
        twice = [one(PROMPTS[-1], -1, extra_key="shared") for _ in range(2)]
        log = server.log_text()
    return Answers(alone, together, twice, read_kernels(place / "stats"), log)


def ask_all(model: Path, folder: Path, servers: dict[str, tuple[str, ...]]) -> dict[str, Answers]:
    with ThreadPoolExecutor(len(servers)) as pool:
        running = {name: pool.submit(ask, model, folder, name, args) for name, args in servers.items()}
        return {name: future.result() for name, future in running.items()}


def test_graphs_batches_pages_and_cached_prefixes_change_nothing(tmp_path) -> None:
    servers = {
        "own": OWN, "zyfa": BOTH, "eager": (*BOTH, "--disable-cuda-graph"), "pages": (*BOTH, "--page-size", "16"),
        "hybrid": HYBRID,
    }  # fmt: skip
    found = ask_all(checkpoint("tiny-qwen3", tmp_path), tmp_path, servers)
    own, zyfa = found["own"], found["zyfa"]
    assert not own.kernels and 0 < difference(zyfa, own) <= BOUND and 0 < difference(found["hybrid"], own) <= BOUND
    for name in ("eager", "pages"):
        assert tokens(found[name].alone) == tokens(zyfa.alone)
        for of in ("input", "output"):
            assert logprobs(found[name].alone, of) == logprobs(zyfa.alone, of)
    assert tokens(zyfa.together) == tokens(zyfa.alone)
    assert logprobs(zyfa.together, "input") == logprobs(zyfa.alone, "input")
    assert "Capture target decode CUDA graph end" in zyfa.log and "Capture" not in found["eager"].log
    for name, page in (("zyfa", 1), ("pages", 16), ("hybrid", 1)):
        first, second = found[name].twice
        cached = [answer["meta_info"]["cached_tokens"] for answer in (first, second)]
        assert cached == [0, (LENGTHS[-1] - 1) // page * page]
        assert first["output_ids"] == second["output_ids"]
    expected = {"triton/fp8-hd128-causal-lean", "triton/fp8-hd128-decode-lean", "triton/rotate-quantize-hd128"}
    assert set(zyfa.kernels) == expected
    assert set(found["hybrid"].kernels) == expected - {"triton/fp8-hd128-decode-lean"}


def test_mla(tmp_path) -> None:
    model = checkpoint("tiny-deepseek-v2-dense", tmp_path, **DEEPSEEK)
    found = ask_all(model, tmp_path, {"own": OWN, "zyfa": HYBRID})
    assert 0 < difference(found["zyfa"], found["own"]) <= BOUND
    assert "triton/fp8-mla-causal-lean" in found["zyfa"].kernels
