"""ZYFA under vLLM on a GPU, over HTTP: the prefill tests of the CPU with the GPU's kernels, and CUDA graphs."""

from __future__ import annotations

import concurrent.futures
import statistics
from pathlib import Path

import pytest
import torch

from tests.engine.serving import FP8, ZYFA, Answer, Engine, counters, ragged_prompts, serve, text_prompts
from tests.engine.test_serving import (
    BOUNDS,
    LENGTHS,
    MODELS,
    NEW_TOKENS,
    TINY_BOUNDS,
    check_close,
    check_tokens,
    differences,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SMALL = ("--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.05")


def launch(checkpoint, folder: Path, name: str, *args: str, env=None, eager: bool = True, label: str = ""):
    return serve(checkpoint(name), folder, *SMALL, *args, env=env, eager=eager, name=f"{name}{label}")


def answers(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    return [engine.complete(ids, NEW_TOKENS, prompt_logprobs=True) for ids in prompts]


@pytest.mark.parametrize("name", [name for name in MODELS if "odd" not in name])
def test_model(name: str, checkpoint, tmp_path) -> None:
    layers, shape, mla = MODELS[name]
    noise, bound = BOUNDS.get(name, TINY_BOUNDS)
    prompts = text_prompts(checkpoint(name), LENGTHS) if name in BOUNDS else ragged_prompts(500, LENGTHS)
    with launch(checkpoint, tmp_path, name, label="-own") as engine:
        theirs = answers(engine, prompts)
        assert "ZYFA" not in engine.log
    with launch(checkpoint, tmp_path, name, *FP8, env=ZYFA, label="-zyfa") as engine:
        ours = answers(engine, prompts)
        again = answers(engine, prompts)
        log = engine.log
    check_close(ours, theirs, bound)
    assert max(differences(ours, theirs)) > 0, "FP8 must not silently be the model's dtype"
    assert "Unknown vLLM environment variable" not in log
    counts = counters(tmp_path / f"{name}-zyfa" / "stats")
    expected = {f"triton/fp8-{shape}-causal-lean"}
    if not mla:
        expected |= {f"engine/fp8-{shape}-decode", f"triton/rotate-quantize-{shape}"}
    assert expected <= set(counts) and not [kernel for kernel in counts if kernel.startswith("torch/")]
    assert counts[f"triton/fp8-{shape}-causal-lean"]["tokens"] >= layers * 2 * (sum(LENGTHS) - LENGTHS.count(1))
    if not mla:  # the second round comes after calibration, so it is the one that repeats
        with launch(checkpoint, tmp_path, name, *FP8, env=ZYFA, label="-second") as engine:
            answers(engine, prompts)
            third = answers(engine, prompts)
        assert [a.prompt_logprobs for a in third] == [a.prompt_logprobs for a in again]
        assert [(a.tokens, a.logprobs) for a in third] == [(a.tokens, a.logprobs) for a in again]


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-qwen3"])
def test_int8(name: str, checkpoint, tmp_path) -> None:
    """int8 K is decoded by ZYFA's kernel; a token scored there is scored alike in prefill."""
    _, shape, _ = MODELS[name]
    noise, bound = TINY_BOUNDS
    prompts = ragged_prompts(500, LENGTHS)
    int8 = {**ZYFA, "ZYFA_CONFIG": "int8"}
    with launch(checkpoint, tmp_path, name, label="-own") as engine:
        theirs = answers(engine, prompts)
    with launch(checkpoint, tmp_path, name, *FP8, env=int8, label="-int8") as engine:
        answers(engine, prompts)
        ours = answers(engine, prompts)
        for ids, answer in zip(prompts, ours, strict=True):
            again = engine.complete(ids + answer.tokens, 1, prompt_logprobs=True)
            rescored = again.prompt_logprobs[-len(answer.tokens) :]
            differ = [abs(a - b) for a, b in zip(rescored, answer.logprobs, strict=True)]
            assert statistics.fmean(differ) < noise
        assert f"decode triton/int8-{shape}-decode-lean" in engine.log
    check_close(ours, theirs, bound)
    counts = counters(tmp_path / f"{name}-int8" / "stats")
    expected = {f"triton/int8-{shape}-causal-lean", f"triton/int8-{shape}-decode-lean"}
    assert expected <= set(counts) and not [kernel for kernel in counts if kernel.startswith(("torch/", "engine/"))]


def test_auto_leaves_the_cache_to_the_engine(checkpoint, tmp_path) -> None:
    prompts = ragged_prompts(500, LENGTHS)
    with launch(checkpoint, tmp_path, "tiny-qwen3", label="-own") as engine:
        theirs = answers(engine, prompts)
    with launch(checkpoint, tmp_path, "tiny-qwen3", env=ZYFA, label="-auto") as engine:
        ours = answers(engine, prompts)
        assert "quantises nothing" in engine.log
    assert [a.prompt_logprobs for a in ours] == [a.prompt_logprobs for a in theirs]


def test_chunks_and_cached_prefixes_have_the_bits_of_the_whole(checkpoint, tmp_path) -> None:
    """One store of scales for all, so that what differs is the cut alone."""
    scales = tmp_path / "scales.safetensors"
    ids = ragged_prompts(500, (1500,))[0]
    with launch(checkpoint, tmp_path, "tiny-qwen3", *FP8, env={**ZYFA, "ZYFA_SAVE_SCALES": str(scales)}) as engine:
        engine.complete(ids, 4)
        engine.complete(ids[:700], 4)
    loaded = {**ZYFA, "ZYFA_SCALES": str(scales)}
    found = {}
    for label, args in (
        ("whole", ("--max-num-batched-tokens", "2048")),
        ("chunked", ("--max-num-batched-tokens", "256", "--enable-chunked-prefill")),
    ):
        with launch(checkpoint, tmp_path, "tiny-qwen3", *FP8, *args, env=loaded, label=label) as engine:
            found[label] = engine.complete(ids, 8, prompt_logprobs=True)
            if label == "whole":
                cold, warm = (engine.complete(ids, 8) for _ in range(2))
                assert warm.cached_tokens > 1000
                assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    differ = [abs(a - b) for a, b in zip(found["whole"].prompt_logprobs, found["chunked"].prompt_logprobs, strict=True)]
    # The engine's own bf16 products differ by batch size; attention adds nothing to that.
    assert statistics.fmean(differ) < 0.01
    assert found["whole"].tokens == found["chunked"].tokens


@pytest.mark.parametrize(
    "name,config", [("tiny-qwen3", "lean"), ("tiny-qwen3", "int8"), ("tiny-deepseek-v2-dense", "lean")]
)
def test_compiled_with_cuda_graphs(name: str, config: str, checkpoint, tmp_path) -> None:
    """Whole graphs for decode and pieces around prefill give what the same compiled model gives without graphs.

    torch.compile itself rounds otherwise than the eager engine, and a code of FP8 is a step away at every tie: those
    two are held to the bound of FP8, and so is a batch of MLA requests, whose matrix products round otherwise than
    those of one. A request for the prompt's log-probabilities reads no cached prefix, which for MLA would be the
    engine's FP8 of the latents.
    """
    noise, bound = TINY_BOUNDS
    prompts = ragged_prompts(500, LENGTHS)
    env, found, batch = {**ZYFA, "ZYFA_CONFIG": config}, {}, []
    for label, args in (("eager", ()), ("compiled", ("-cc.cudagraph_mode=NONE",)), ("graphs", ())):
        eager = label == "eager"
        with launch(checkpoint, tmp_path, name, *FP8, *args, env=env, eager=eager, label=f"-{label}") as engine:
            answers(engine, prompts)
            found[label] = answers(engine, prompts)
            captured = "Graph capturing finished" in engine.log
            if label == "graphs":
                with concurrent.futures.ThreadPoolExecutor(8) as pool:
                    batch = list(pool.map(lambda ids, e=engine: e.complete(ids, NEW_TOKENS, True), prompts))
        assert captured == (label == "graphs")
    check_close(found["graphs"], found["compiled"], noise)
    check_close(found["graphs"], found["eager"], bound)
    check_close(batch, found["graphs"], bound)
    if not MODELS[name][2]:
        check_tokens(batch, found["graphs"], noise)


def test_nothing_waits_for_the_device(checkpoint, monkeypatch) -> None:
    """ZYFA's part of a step under torch's synchronisation check, prefill, decode and mixed."""
    from vllm import LLM, SamplingParams

    for variable, value in {**ZYFA, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(variable, value)
    from zyfa_backend.vllm.gpu import ZyfaGpuImpl

    calls = []

    def strict(method):
        def run(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("error")
            try:
                calls.append(method.__name__)
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    engine = LLM(
        str(checkpoint("tiny-qwen3")), kv_cache_dtype="fp8", enforce_eager=True, max_model_len=2048,
        kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.05,
    )
    prompts = [{"prompt_token_ids": ids} for ids in ragged_prompts(500, (300, 20, 700))]
    engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0))  # compiles, calibrates
    monkeypatch.setattr(ZyfaGpuImpl, "forward", strict(ZyfaGpuImpl.forward))
    engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0))
    assert len(calls) >= 2 * 8
