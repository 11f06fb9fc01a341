"""What ZYFA costs on a CPU, measured as pairs in one run: two servers, requests in turn."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.engine.serving import FP8, ZYFA, Engine, ragged_prompts, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PREFILL_BOUND = 2.5
DECODE_BOUND = 2.0
PROMPT, NEW_TOKENS, REPEATS = 2048, 24, 3


def seconds(engine: Engine, ids: list[int], tokens: int) -> float:
    start = time.perf_counter()
    engine.complete(ids, tokens)
    return time.perf_counter() - start


def test_prefill_and_decode_against_the_builtin_backend(checkpoint, tmp_path, record_property) -> None:
    """A 2,048-token prompt on smollm2-hd128: the whole request, and then a token of decode behind it."""
    model = checkpoint("smollm2-hd128")
    arguments = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
    with serve(model, tmp_path, *arguments, name="own") as own, \
            serve(model, tmp_path, *arguments, *FP8, env=ZYFA, name="zyfa") as zyfa:
        prefill: dict[str, list[float]] = {"own": [], "zyfa": []}
        decode: dict[str, list[float]] = {"own": [], "zyfa": []}
        for repeat in range(REPEATS + 1):
            ids = ragged_prompts(40000, (PROMPT,), seed=repeat)[0]
            for name, engine in (("own", own), ("zyfa", zyfa)):
                first = seconds(engine, ids, 1)
                longer = seconds(engine, ids, 1 + NEW_TOKENS)
                if repeat:  # the first round warms caches up
                    prefill[name].append(first)
                    decode[name].append((longer - first) / NEW_TOKENS)
    ratios = {}
    for what, times in (("prefill", prefill), ("decode", decode)):
        ours, theirs = statistics.median(times["zyfa"]), statistics.median(times["own"])
        ratios[what] = ours / theirs
        print(f"{what}: ZYFA {ours:.3f} s, builtin {theirs:.3f} s, ratio {ratios[what]:.2f}")
    assert ratios["prefill"] <= PREFILL_BOUND
    assert ratios["decode"] <= DECODE_BOUND
