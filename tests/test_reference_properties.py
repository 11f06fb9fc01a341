"""Properties that hold for every input; they catch what a comparison on random data cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_cases import KINDS, inputs, operands, rows, same_bits
from zyfa_backend import reference
from zyfa_backend.config import EXACT, INT8, LEAN, LEAN_NO_ROTATION, PRESETS, UNQUANTIZED

QUANTISED = {name: config for name, config in PRESETS.items() if config.quantized}


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(1, 700),
    kind=st.sampled_from(KINDS),
    preset=st.sampled_from(sorted(QUANTISED)),
    tile=st.sampled_from([64, 128]),
    offset=st.sampled_from([8.0, 3.0, 0.0]),
    window=st.one_of(st.none(), st.integers(0, 300)),
    seed=st.integers(0, 10**6),
    value=st.sampled_from([1.0, -448.0, 0.0625]),
)
def test_equal_values_come_back_unchanged(tokens, kind, preset, tile, offset, window, seed, value) -> None:
    """Weights sum to one: V = 1 gives exactly 1 in bf16. Dividing by the unrounded sum returns as little as 0.64."""
    config = replace(QUANTISED[preset], tile=tile, offset=offset)
    q, k, v = inputs(tokens, 2, 1, kind=kind, seed=seed, queries=min(tokens, 80))
    out, _ = reference.attention(
        q, k, torch.full_like(v, value), softmax_scale=0.09, window=window, config=config, v_scale=1.0
    )
    assert (out == value).all(), f"{(out != value).sum()} of {out.numel()} differ, e.g. {out[out != value][0]}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["lean", "exact", "int8"])
def test_equal_values_at_16k_keys(preset: str, kind: str) -> None:
    q, k, v = inputs(16384, 1, 1, kind=kind, queries=130)
    out, _ = reference.attention(q, k, torch.ones_like(v), softmax_scale=0.09, config=PRESETS[preset])
    assert (out == 1).all()


def test_one_key_far_above_many_tiny_ones() -> None:
    """The adversary of an unrounded sum: thousands of weights that all round the same way."""
    tokens = 4096
    q = torch.zeros(64, 1, 128)
    q[..., 0] = 1
    k = torch.zeros(tokens, 1, 128)
    for gap in (0.5, 3.0, 6.3, 9.1, 12.45, 17.0):
        k[:, 0, 0] = -gap
        k[tokens // 2, 0, 0] = 0
        for config in (EXACT, LEAN_NO_ROTATION):
            config = replace(config, rotation="none")
            out, lse = reference.attention(q, k, torch.ones(tokens, 1, 128), softmax_scale=1.0, config=config)
            assert (out.bfloat16() == 1).all()


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 400),
    kind=st.sampled_from(KINDS),
    preset=st.sampled_from(sorted(PRESETS)),
    seed=st.integers(0, 10**6),
)
def test_output_lies_in_the_convex_hull_of_v(tokens: int, kind: str, preset: str, seed: int) -> None:
    config = PRESETS[preset]
    q, k, v = operands(*inputs(tokens, 2, 1, kind=kind, seed=seed, queries=min(tokens, 50)), config)
    out, _ = reference.attend(q, k, v, softmax_scale=0.09, causal=True, config=config, out_dtype=torch.float32)
    values = v.dequantize()[:, 0]
    slack = 1e-5 * values.abs().max()
    for i in range(out.shape[0]):
        seen = values[: tokens - out.shape[0] + i + 1]
        assert (out[i] <= seen.amax(0) + slack).all() and (out[i] >= seen.amin(0) - slack).all()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_order_of_keys_does_not_matter(preset: str) -> None:
    """Without a mask. P is rounded relative to the maximum at its time, so only up to that rounding."""
    config = PRESETS[preset]
    q, k, v = operands(*inputs(500, 2, 1, seed=1, queries=64), config)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    call = {"softmax_scale": 0.09, "causal": False, "config": config, "out_dtype": torch.float32}
    out, lse = reference.attend(q, k, v, **call)
    other, other_lse = reference.attend(q, rows(k, order), rows(v, order), **call)
    bound = 3e-5 if config.probabilities == "none" else 0.03
    assert float((out - other).norm() / out.norm()) < bound
    assert float((lse - other_lse).abs().max()) < bound


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("cut", [1, 64, 200, 449])
def test_states_of_two_parts_merge_to_the_whole(preset: str, cut: int) -> None:
    config = PRESETS[preset]
    q, k, v = operands(*inputs(450, 3, 1, seed=8, queries=100), config)
    call = {"softmax_scale": 0.09, "causal": True, "config": config, "out_dtype": torch.float32}
    whole, whole_lse = reference.attend(q, k, v, **call)
    first = reference.attend(q, rows(k, slice(0, cut)), rows(v, slice(0, cut)), **call, context=350)
    second = reference.attend(q, rows(k, slice(cut, None)), rows(v, slice(cut, None)), **call, context=350 - cut)
    out, lse = reference.merge_states(*first, *second)
    bound = 1e-5 if config.probabilities == "none" else 0.03
    assert float((out - whole).norm() / whole.norm()) < bound
    assert float((lse - whole_lse).abs().max()) < bound


def test_merging_with_nothing_changes_nothing() -> None:
    out, lse = torch.randn(5, 2, 8), torch.randn(2, 5)
    nothing = torch.full((5, 2, 8), torch.nan), torch.full((2, 5), -torch.inf)
    merged, merged_lse = reference.merge_states(out, lse, *nothing)
    assert same_bits(merged, out) and same_bits(merged_lse, lse)
    merged, merged_lse = reference.merge_states(*nothing, *nothing)
    assert (merged == 0).all() and (merged_lse == -torch.inf).all()


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_a_bad_token_reaches_only_rows_that_see_it(preset: str, bad: float, operand: str) -> None:
    config = PRESETS[preset]
    tensors = dict(zip("qkv", inputs(300, 3, 1, seed=6), strict=True))
    bounds = torch.tensor([0, 170, 300])
    scales = {"k_scale": 0.02, "v_scale": 0.02} if config.quantized else {}

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return reference.attention(
            *tensors.values(), softmax_scale=0.09, config=config, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **scales
        )

    clean, clean_lse = run()
    tensors[operand] = tensors[operand].clone()
    tensors[operand][70, 0, 9] = bad
    out, lse = run()
    touched = torch.zeros(300, 3, dtype=torch.bool)
    if operand == "q":
        touched[70, 0] = True
    else:
        touched[70:170] = True
    assert same_bits(out[~touched], clean[~touched]) and same_bits(lse.T[~touched], clean_lse.T[~touched])
    if torch.isnan(torch.tensor(bad)) or operand == "q" and config.qk_format != "none":
        assert torch.isnan(out[touched]).any(-1).all()
    if operand == "v" and bad != bad:
        assert torch.isnan(out[touched]).sum() == touched.sum(), "only the channel concerned"


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("operand", ["k", "v"])
def test_a_bad_token_outside_the_window_is_not_seen(preset: str, operand: str) -> None:
    config = PRESETS[preset]
    tensors = dict(zip("qkv", inputs(300, 3, 1, seed=6), strict=True))
    call = {"softmax_scale": 0.09, "config": config, "window": 30}
    call |= {"k_scale": 0.02, "v_scale": 0.02} if config.quantized else {}
    clean, _ = reference.attention(*tensors.values(), **call)
    tensors[operand][70] = torch.nan
    out, _ = reference.attention(*tensors.values(), **call)
    assert torch.isnan(out[70:101]).all() and not torch.isnan(out[:70]).any() and not torch.isnan(out[101:]).any()
    assert same_bits(out[101:], clean[101:])


@pytest.mark.parametrize("config", [EXACT, LEAN, INT8])
@pytest.mark.parametrize("tile", [64, 128])
def test_codes_never_pass_448(config, tile: int) -> None:
    """Rows whose maximum rises in every block, in steps up to a thousand binades: P stays within e4m3."""
    from zyfa_backend.reference_tiles import block_probabilities

    for step in (0.0, 0.3, 1.0, 7.9, 8.0, 100.0, 1000.0):
        x = torch.rand(4, 1024) * 2 + step * (torch.arange(1024) // 64)
        m = torch.full((4,), -torch.inf)
        p, factor, m_after = block_probabilities(x.clone(), m, replace(config, tile=tile), torch.empty(4 * 1024))
        scale = 256 if config.probabilities == "lean" else 1
        assert float(p.max()) * scale <= 256 and (m_after == x.amax(-1)).all()
        assert torch.isfinite(factor).all() and (p >= 0).all()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_flushing_denormals_changes_nothing(preset: str) -> None:
    """Some engines set it; the codes near zero must not pass through numbers it flushes."""
    q, k, v = inputs(300, 2, 1, kind="falling", seed=3)
    expected, _ = reference.attention(q, k, v, softmax_scale=0.3, config=PRESETS[preset])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        out, _ = reference.attention(q, k, v, softmax_scale=0.3, config=PRESETS[preset])
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_lse_of_unquantised_is_natural_log() -> None:
    out, lse = reference.attention(
        torch.zeros(4, 1, 64), torch.zeros(4, 1, 64), torch.ones(4, 1, 64), softmax_scale=1.0, config=UNQUANTIZED
    )
    torch.testing.assert_close(lse[0], torch.log(torch.arange(1.0, 5.0)))


def test_lse_of_constant_scores() -> None:
    """64 keys with score s: lse = s + ln 64, exactly representable probabilities."""
    q = torch.zeros(1, 1, 64)
    q[..., 0] = 2.0
    k = torch.zeros(64, 1, 64)
    k[..., 0] = 3.0
    for config in (EXACT, replace(INT8, probabilities="exact")):
        _, lse = reference.attention(q, k, k, softmax_scale=0.5, config=replace(config, rotation="none"))
        torch.testing.assert_close(lse, torch.full((1, 1), 3.0 + 4.1588830833596715), rtol=1e-5, atol=0)
