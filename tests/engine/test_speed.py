"""What ZYFA costs on a CPU, measured as pairs in one run: two servers, requests in turn."""

from __future__ import annotations

import time

import pytest

from tests.engine.serving import FP8, ZYFA, Engine, ragged_prompts, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PREFILL_BOUND = 2.5
DECODE_BOUND = 2.0
PROMPT, NEW_TOKENS, REPEATS = 2048, 24, 4


def seconds(engine: Engine, ids: list[int], tokens: int) -> float:
    start = time.perf_counter()
    engine.complete(ids, tokens)
    return time.perf_counter() - start


@pytest.fixture(scope="module")
def ratios(checkpoint, tmp_path_factory) -> dict[str, float]:
    """ZYFA's time over the builtin's for a 2,048-token prompt on smollm2-hd128, and for a token of decode behind it."""
    model, folder = checkpoint("smollm2-hd128"), tmp_path_factory.mktemp("speed")
    arguments = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
    with serve(model, folder, *arguments, name="own") as own, \
            serve(model, folder, *arguments, *FP8, env=ZYFA, name="zyfa") as zyfa:
        first: dict[str, list[float]] = {"own": [], "zyfa": []}
        longer: dict[str, list[float]] = {"own": [], "zyfa": []}
        for repeat in range(REPEATS + 1):
            ids = ragged_prompts(40000, (PROMPT,), seed=repeat)[0]
            for name, engine in (("own", own), ("zyfa", zyfa)):
                times = seconds(engine, ids, 1), seconds(engine, ids, 1 + NEW_TOKENS)
                if repeat:  # the first round warms caches up
                    first[name].append(times[0])
                    longer[name].append(times[1])
    # The fastest of several: other work on the machine only adds.
    prefill = {name: min(times) for name, times in first.items()}
    decode = {name: (min(times) - prefill[name]) / NEW_TOKENS for name, times in longer.items()}
    return {"prefill": prefill["zyfa"] / prefill["own"], "decode": decode["zyfa"] / decode["own"]}


def test_prefill(ratios, capsys) -> None:
    with capsys.disabled():  # a measurement is worth seeing when it passes, too
        print(f"\nZYFA / builtin on a CPU: {ratios}")
    assert ratios["prefill"] <= PREFILL_BOUND


def test_decode(ratios) -> None:
    assert ratios["decode"] <= DECODE_BOUND
