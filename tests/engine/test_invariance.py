"""What a request gets must not depend on how the engine cuts, caches, batches or preempts it."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from tests.engine.serving import FP8, ZYFA, Answer, counters, parse, ragged_prompts, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def scales(checkpoint, tmp_path_factory):
    """K and V scales calibrated once: servers that are compared bit for bit must share them."""
    folder = tmp_path_factory.mktemp("scales")
    path = folder / "scales.safetensors"
    with serve(checkpoint("tiny-qwen3"), folder, *FP8, env={**ZYFA, "ZYFA_SAVE_SCALES": str(path)}) as engine:
        engine.complete(ragged_prompts(500, (700,))[0], 1)
    assert path.exists()
    return {**ZYFA, "ZYFA_SCALES": str(path)}


def test_chunked_equals_whole_and_cached_equals_cold(checkpoint, tmp_path, scales) -> None:
    prompts = ragged_prompts(500, (65, 129, 700, 1000), seed=1)
    model = checkpoint("tiny-qwen3")
    with serve(model, tmp_path, *FP8, "--max-num-batched-tokens", "2048", env=scales, name="whole") as engine:
        whole = [engine.complete(ids, 8, prompt_logprobs=True) for ids in prompts]
        cold = [engine.complete(ids, 8, cache_salt=f"cold{i}") for i, ids in enumerate(prompts)]
        cached = [engine.complete(ids, 8, cache_salt=f"cold{i}") for i, ids in enumerate(prompts)]
        assert "file " in engine.log, "the start-up log must say where the scales come from"
    assert [answer.cached_tokens for answer in cached] == [(len(ids) - 1) // 128 * 128 for ids in prompts]
    for a, b in zip(cold, cached, strict=True):
        assert (a.tokens, a.logprobs) == (b.tokens, b.logprobs)
    # Chunks of 100 tokens end inside blocks, tiles and cache blocks.
    with serve(model, tmp_path, *FP8, "--max-num-batched-tokens", "100", env=scales, name="chunked") as engine:
        chunked = [engine.complete(ids, 8, prompt_logprobs=True) for ids in prompts]
    whole_calls = counters(tmp_path / "whole/stats")["torch/fp8-hd128-causal-lean"]["calls"]
    assert counters(tmp_path / "chunked/stats")["torch/fp8-hd128-causal-lean"]["calls"] > whole_calls / 2
    for a, b in zip(whole, chunked, strict=True):
        assert (a.tokens, a.prompt_logprobs, a.logprobs) == (b.tokens, b.prompt_logprobs, b.logprobs)


def test_concurrent_and_preempted_equals_alone(checkpoint, tmp_path, scales) -> None:
    """Eight clients on a cache that holds about a third of what they need, each outgrowing a block while it decodes.

    fp32 weights keep the engine's own products from differing by batch size: what remains to differ is attention.
    """
    prompts = ragged_prompts(500, (60, 100, 120, 200, 230, 250, 330, 370), seed=2)
    arguments = (*FP8, "--dtype", "float32", "--num-gpu-blocks-override", "10", "--max-model-len", "512")
    with serve(checkpoint("tiny-qwen3"), tmp_path, *arguments, env=scales) as engine:
        alone = [engine.complete(ids, 100, cache_salt=f"alone{i}") for i, ids in enumerate(prompts)]
        assert engine.metric("vllm:num_preemptions_total") == 0
        start = Barrier(len(prompts))

        def ask(ids: list[int]) -> Answer:
            start.wait()
            return engine.complete(ids, 100)

        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(ask, prompts))
        assert engine.metric("vllm:num_preemptions_total") > 0
    for a, b in zip(alone, together, strict=True):
        assert a.tokens == b.tokens
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 0.02


def test_nan_in_one_request_stays_there(checkpoint, tmp_path, scales) -> None:
    prompts = ragged_prompts(500, (40, 90, 200), seed=3)
    embedding = torch.randn(60, 256, dtype=torch.bfloat16)
    embedding[30:] = torch.nan
    stream = io.BytesIO()
    torch.save(embedding, stream)
    poison = {
        "model": "m", "prompt_embeds": base64.b64encode(stream.getvalue()).decode(), "max_tokens": 8, "temperature": 0,
    }
    arguments = (*FP8, "--enable-prompt-embeds", "--no-enable-prefix-caching", "--dtype", "float32")
    with serve(checkpoint("tiny-qwen3"), tmp_path, *arguments, env=scales) as engine:
        alone = [engine.complete(ids, 60) for ids in prompts]
        with ThreadPoolExecutor(6) as pool:
            bad = [pool.submit(engine.server_post, poison) for _ in range(3)]
            good = [pool.submit(engine.complete, ids, 60) for ids in prompts]
            together = [future.result() for future in good]
            statuses = [future.result() for future in bad]
        after = [engine.complete(ids, 60) for ids in prompts]
    assert any(status == 200 for status in statuses), "the poisoned requests must have run"
    for a, b, c in zip(alone, together, after, strict=True):
        assert a.tokens == b.tokens == c.tokens


def test_window_prompt_longer_than_window(checkpoint, tmp_path) -> None:
    """A window drops keys: with FP8 the answer to a long prompt stays near the engine's own in bf16."""
    ids = ragged_prompts(500, (1500,), seed=4)[0]
    found = []
    for name, args, env in (("own", (), None), ("zyfa", FP8, ZYFA)):
        with serve(checkpoint("tiny-mistral-window"), tmp_path, *args, env=env, name=name) as engine:
            found.append(parse(engine.post("/v1/completions", {
                "model": "m", "prompt": ids, "max_tokens": 4, "temperature": 0, "logprobs": 2, "prompt_logprobs": 0,
                "return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True,
            }), ids))
    scored = [abs(a - b) for a, b in zip(found[0].prompt_logprobs, found[1].prompt_logprobs, strict=True)]
    assert sum(scored) / len(scored) < 0.10
