"""Every model over HTTP: the engine's own backend against ZYFA without and with quantisation, and which kernel ran."""

from __future__ import annotations

import statistics

import pytest

from tests.engine.serving import FP8, ZYFA, Answer, counters, ragged_prompts, serve, text_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (1, 2, 63, 64, 65, 127, 300)
NEW_TOKENS = 8
# name -> (layers, head shape in kernel names, MLA)
MODELS = {
    "tiny-mistral": (2, "hd128", False),
    "tiny-mistral-odd": (2, "hd128", False),
    "tiny-mistral-window": (2, "hd128", False),
    "tiny-qwen3": (2, "hd128", False),
    "tiny-deepseek-v2": (2, "mla", True),
    "tiny-deepseek-v2-dense": (2, "mla", True),
    "smollm2-hd128": (30, "hd128", False),
}
# Mean |difference| of the log-probability of a token against the engine's own backend in bf16: without quantisation,
# and with FP8. The real model is asked for text; its 30 layers and peaked attention add up more rounding.
BOUNDS = {"smollm2-hd128": (0.06, 0.20)}
TINY_BOUNDS = (0.02, 0.10)


def run(checkpoint, folder, name: str, *args: str, env=None) -> tuple[list[Answer], dict, str]:
    prompts = text_prompts(checkpoint(name), LENGTHS) if name in BOUNDS else ragged_prompts(500, LENGTHS)
    with serve(checkpoint(name), folder, *args, env=env, name=f"{name}{'-'.join(args)}{env}") as engine:
        answers = [engine.complete(ids, NEW_TOKENS, prompt_logprobs=True) for ids in prompts]
        log = engine.log
    return answers, counters(engine.stats), log


def differences(ours: list[Answer], theirs: list[Answer]) -> list[float]:
    """|difference| of the log-probability of every scored prompt token."""
    pairs = zip(ours, theirs, strict=True)
    return [abs(a - b) for x, y in pairs for a, b in zip(x.prompt_logprobs, y.prompt_logprobs, strict=True)]


def check_close(ours: list[Answer], theirs: list[Answer], bound: float) -> None:
    scored = differences(ours, theirs)
    assert len(scored) == sum(LENGTHS) - len(LENGTHS)
    assert statistics.fmean(scored) <= bound
    check_tokens(ours, theirs, bound)


def check_tokens(ours: list[Answer], theirs: list[Answer], bound: float) -> None:
    """Completions agree up to the first token that the model itself hardly preferred."""
    for x, y in zip(ours, theirs, strict=True):
        for step, (a, b) in enumerate(zip(x.tokens, y.tokens, strict=True)):
            if a != b:
                # A different token is a fault unless the model itself hardly preferred its own.
                best, second = sorted(y.top[step].values(), reverse=True)[:2]
                assert best - second <= 4 * bound, f"token {step}: {a} for {b} at a margin of {best - second}"
                break
            assert abs(x.logprobs[step] - y.logprobs[step]) <= 8 * bound


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, checkpoint, tmp_path) -> None:
    layers, shape, mla = MODELS[name]
    noise, fp8_bound = BOUNDS.get(name, TINY_BOUNDS)
    theirs, none, log = run(checkpoint, tmp_path, name)
    assert none == {} and "ZYFA" not in log, "the plugin must change nothing where it is not chosen"

    plain, counts, log = run(checkpoint, tmp_path, name, env=ZYFA)
    assert "Unknown vLLM environment variable" not in log
    check_close(plain, theirs, noise)
    expected = {f"torch/bf16-{shape}-causal"}
    if not mla:
        expected |= {f"numba/bf16-{shape}-decode", f"torch/write-{shape}"}
    assert set(counts) == expected
    check_counts(counts, f"bf16-{shape}", layers, mla)

    quantised, counts, log = run(checkpoint, tmp_path, name, *FP8, env=ZYFA)
    check_close(quantised, theirs, fp8_bound)
    expected = {f"torch/fp8-{shape}-causal-lean"}
    if not mla:
        expected |= {f"numba/fp8-{shape}-decode-lean", f"numba/rotate-quantize-{shape}"}
    assert set(counts) == expected
    check_counts(counts, f"fp8-{shape}", layers, mla, "-lean")
    assert max(differences(quantised, plain)) > 0, "FP8 must not silently be the model's dtype"


def check_counts(counts: dict, stem: str, layers: int, mla: bool, suffix: str = "") -> None:
    """Each prompt is prefilled once in every layer, each token but the first decoded once in every layer.

    For MLA the engine decides, and gives a prompt of one token to its decode.
    """
    prefill = counts[f"torch/{stem}-causal{suffix}"]
    assert prefill["tokens"] == layers * (sum(LENGTHS) - (LENGTHS.count(1) if mla else 0))
    if not mla:
        assert counts[f"numba/{stem}-decode{suffix}"]["tokens"] == layers * len(LENGTHS) * (NEW_TOKENS - 1)
