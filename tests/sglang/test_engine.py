"""Whole engines: tokens of SGLang with ZYFA against transformers, and against ZYFA under vLLM."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sglang.checkpoints import DEEPSEEK, checkpoint
from zyfa_backend.compare.runner import read_kernels

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
NEW_TOKENS, LAYERS = 8, 2
CHUNK = 64
# fp32, so that tokens are those of another implementation and no tie is decided by rounding of the matrix products.
ENGINE = {"dtype": "float32", "max_total_tokens": 4096, "chunked_prefill_size": CHUNK}
# Overlapped, a step runs before the one before it is known to be the last, so what ran can't be counted.
IN_TURN = {"disable_overlap_schedule": True}
BOTH = {"attention_backend": "zyfa"}
HYBRID = {
    "attention_backend": "torch_native",
    "prefill_attention_backend": "zyfa",
    "decode_attention_backend": "torch_native",
}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


@dataclass(frozen=True)
class Run:
    """Answers of each step, counters by kernel, and the log."""

    steps: list[list[dict]]
    kernels: dict[str, dict[str, int]]
    log: str

    @property
    def tokens(self) -> list[list[int]]:
        return [answer["tokens"] for step in self.steps for answer in step]

    @property
    def logprobs(self) -> list[float]:
        return [value for step in self.steps for answer in step for value in answer["logprobs"]]


def prompts() -> list[list[list[int]]]:
    """One of four chunks; one that shares 200 tokens with it; three at once: one shares 149, one has a single token."""
    source = random.Random(0)
    ids = [source.randrange(10, 500) for _ in range(300)]
    return [[ids[:200]], [ids[:200] + ids[250:290]], [ids[:150], ids[200:263], ids[100:101]]]


CACHED = [[0], [200], [149, 0, 0]]
CACHED_IN_PAGES = [[0], [192], [144, 0, 0]]
PROMPT_TOKENS = sum(len(ids) for step in prompts() for ids in step)
PREFILLED = PROMPT_TOKENS - sum(sum(step) for step in CACHED)
DECODED = 5 * (NEW_TOKENS - 1)


def run(command: list[str], model: Path, engine: dict, stats: Path, **environment: str) -> Run:
    job = {"model": str(model), "engine": engine, "steps": prompts(), "new_tokens": NEW_TOKENS}
    env = {name: value for name, value in os.environ.items() if not name.startswith("ZYFA_")}
    env |= {"HF_HUB_OFFLINE": "1", "ZYFA_STATS": str(stats), **environment}
    done = subprocess.run([*command, json.dumps(job)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    log = done.stdout + done.stderr
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, log[-4000:]
    return Run(json.loads(lines[0]), read_kernels(stats), log)


def sglang(model: Path, engine: dict, stats: Path, **environment: str) -> Run:
    arguments = {**ENGINE, **IN_TURN, **engine}
    found = run([sys.executable, "-m", "tests.sglang.engine_job"], model, arguments, stats, **environment)
    expected = CACHED_IN_PAGES if arguments.get("page_size") == 16 else CACHED
    assert [[answer["cached"] for answer in step] for step in found.steps] == expected
    return found


def transformers_tokens(model: Path) -> list[list[int]]:
    """Greedy tokens of each prompt, computed whole and alone."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for step in prompts():
        for ids in step:
            out = network.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
            found.append(out[0, len(ids) :].tolist())
    return found


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return checkpoint("tiny-qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    """SGLang's rotary embedding for DeepSeek on a CPU is the scaled one of DeepSeek-V2-Lite, so the model gets it."""
    scaling = {
        "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }
    return checkpoint(
        "tiny-deepseek-v2-dense", tmp_path_factory.mktemp("models"), **DEEPSEEK, rope_scaling=scaling
    )


@pytest.fixture(scope="module")
def reference(qwen3) -> list[list[int]]:
    return transformers_tokens(qwen3)


def test_without_quantisation_the_tokens_are_those_of_transformers(qwen3, reference, tmp_path) -> None:
    """Chunked prefill, hits in the radix cache, several requests at once; a prompt of one token is prefilled, too."""
    found = sglang(qwen3, BOTH, tmp_path)
    assert found.tokens == reference
    chunks = f"#new-token: {CHUNK}, #cached-token: 0"
    assert found.log.count(chunks) >= 3, "the first prompt was not cut into chunks"
    assert found.kernels["torch/fp32-hd128-causal"]["tokens"] == LAYERS * PREFILLED
    assert found.kernels["torch/fp32-hd128-decode"]["tokens"] == LAYERS * DECODED
    assert found.kernels["torch/write-hd128"]["tokens"] == LAYERS * (PREFILLED + DECODED)


def test_overlapped_steps_pages_and_mixed_batches_change_no_token(qwen3, reference, tmp_path) -> None:
    """The engine's default schedule, a pool in pages of 16, and decodes that run in the batch of another's chunk."""
    mixed = {"disable_overlap_schedule": False, "page_size": 16, "enable_mixed_chunk": True}
    found = sglang(qwen3, {**BOTH, **mixed}, tmp_path)
    assert found.tokens == reference
    # A decode in a mixed batch is an extend of one token.
    alone = PROMPT_TOKENS - sum(map(sum, CACHED_IN_PAGES))
    assert found.kernels["torch/fp32-hd128-causal"]["tokens"] > LAYERS * alone
    assert found.kernels["torch/fp32-hd128-decode"]["tokens"] > 0


def test_quantised_the_tokens_are_those_of_zyfa_under_vllm(qwen3, reference, tmp_path) -> None:
    """vLLM calibrates the scales and saves them, SGLang loads them; vLLM computes prompts whole, SGLang in chunks."""
    python = os.environ.get("VLLM_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip(f"no environment of vLLM: {python} does not exist; examples/setup_cpu.py makes one")
    scales = str(tmp_path / "scales.safetensors")
    theirs = run(
        [python, str(ROOT / "tests" / "sglang" / "vllm_job.py")],
        qwen3,
        {"dtype": "float32", "kv_cache_dtype": "fp8", "max_model_len": 512},
        tmp_path / "vllm",
        VLLM_ATTENTION_BACKEND="ZYFA", ZYFA_SAVE_SCALES=scales, VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    ours = sglang(qwen3, {**BOTH, **FP8}, tmp_path / "sglang", ZYFA_SCALES=scales)
    for found, decode in ((ours, "torch"), (theirs, "numba")):
        assert found.kernels[f"{decode}/fp8-hd128-decode-lean"]["tokens"] == LAYERS * DECODED
    assert ours.kernels["torch/fp8-hd128-causal-lean"]["tokens"] == LAYERS * PREFILLED
    assert ours.tokens == theirs.tokens
    # Beyond the order of fp32 sums, a code on a tie; quantisation itself moves them by two orders more.
    differences = [abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
    assert sum(differences) / len(differences) < 1e-3, max(differences)
    assert ours.tokens != reference, "FP8 must not silently be the model's dtype"


def test_foreign_decode_reads_the_rotated_fp8_cache(qwen3, reference, tmp_path) -> None:
    """torch_native knows no rotation. Were its query not turned, its tokens would be another model's."""
    found = sglang(qwen3, {**HYBRID, **FP8}, tmp_path)
    assert set(found.kernels) == {"torch/fp8-hd128-causal-lean", "torch/rotate-quantize-hd128"}
    assert found.kernels["torch/rotate-quantize-hd128"]["tokens"] == LAYERS * (PREFILLED + DECODED)
    assert "decode torch_native, the engine's, cache fp8_e4m3, rotation hadamard, scales default 1" in found.log
    # The first of a request's tokens come from prefill, all others from decode; FP8 may turn a close one.
    pairs = zip(sum(found.tokens, []), sum(reference, []), strict=True)
    same = [ours == theirs for ours, theirs in pairs]
    assert sum(same) / len(same) >= 0.75, found.tokens


def test_mla_prefill_with_the_engines_absorbed_decode(deepseek, tmp_path) -> None:
    found = sglang(deepseek, HYBRID, tmp_path)
    assert found.tokens == transformers_tokens(deepseek)
    assert found.kernels == {"torch/fp32-mla-causal": found.kernels["torch/fp32-mla-causal"]}
    assert found.kernels["torch/fp32-mla-causal"]["tokens"] == LAYERS * PREFILLED


def test_choosing_zyfa_after_a_failure_names_the_cause(qwen3, tmp_path) -> None:
    with pytest.raises(AssertionError) as failed:
        sglang(qwen3, BOTH, tmp_path, ZYFA_CONFIG="leen")
    assert "RegistrationError: zyfa was chosen, but could not be registered: ZYFA_CONFIG=leen" in str(failed.value)
