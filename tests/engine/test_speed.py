"""What ZYFA costs on a CPU, measured as pairs in one run: two servers, requests in turn."""

from __future__ import annotations

import pytest

from tests.engine.serving import FP8, ZYFA, ragged_prompts, serve
from zyfa_backend.compare.client import Client

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PREFILL_BOUND = 2.5
DECODE_BOUND = 2.0
PROMPT, NEW_TOKENS, REPEATS = 2048, 32, 6


@pytest.fixture(scope="module")
def ratios(checkpoint, tmp_path_factory) -> dict[str, float]:
    """ZYFA's time over the builtin's for a 2,048-token prompt on smollm2-hd128, and for a token of decode behind it."""
    model, folder = checkpoint("smollm2-hd128"), tmp_path_factory.mktemp("speed")
    arguments = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
    with serve(model, folder, *arguments, name="own") as own, \
            serve(model, folder, *arguments, *FP8, env=ZYFA, name="zyfa") as zyfa, \
            Client(own.url, 300) as own_client, Client(zyfa.url, 300) as zyfa_client:
        prefill: dict[str, list[float]] = {"own": [], "zyfa": []}
        decode: dict[str, list[float]] = {"own": [], "zyfa": []}
        for repeat in range(REPEATS + 1):
            ids = ragged_prompts(40000, (PROMPT,), seed=repeat)[0]
            for name, client in (("own", own_client), ("zyfa", zyfa_client)):
                answer = client.generate(ids, 1 + NEW_TOKENS)
                if repeat:  # the first round warms caches up
                    prefill[name].append(answer.ttft_s)
                    # Of one request: prefill varies by more than all these tokens take.
                    decode[name].append((answer.total_s - answer.ttft_s) / NEW_TOKENS)
    # The fastest of several: other work on the machine only adds.
    return {what: min(times["zyfa"]) / min(times["own"]) for what, times in (("prefill", prefill), ("decode", decode))}


def test_prefill(ratios, capsys) -> None:
    with capsys.disabled():  # a measurement is worth seeing when it passes, too
        print(f"\nZYFA / builtin on a CPU: {ratios}")
    assert ratios["prefill"] <= PREFILL_BOUND


def test_decode(ratios) -> None:
    assert ratios["decode"] <= DECODE_BOUND
