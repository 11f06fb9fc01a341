"""The reference against the specification written out key by key, and against fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_cases import KINDS, LENGTHS, inputs, operands
from zyfa_backend import oracle, reference
from zyfa_backend.config import EXACT, INT8, LEAN, PRESETS, UNQUANTIZED, AttentionConfig
from zyfa_backend.products import stepwise_products
from zyfa_backend.quantization import Quantized
from zyfa_backend.reference_tiles import block_probabilities

E4M3 = numpy.arange(256, dtype=numpy.uint8).view(ml_dtypes.float8_e4m3fn).astype(numpy.float64)


def codes_of(y: numpy.ndarray, config: AttentionConfig) -> numpy.ndarray:
    """P of the specification: e4m3 codes of 2^y."""
    if config.probabilities == "exact":
        return numpy.exp2(y.astype(numpy.float64)).astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
    return numpy.clip(numpy.rint(8 * y + numpy.float32(56 + config.delta)), 0, 126).astype(numpy.uint8)


def written_out(
    q: Quantized, k: Quantized, v: Quantized, scale: float, config: AttentionConfig, window: int | None
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Section 2 of the specification for one query and one block of keys after the other (causal).

    Scores and exponents in fp32, as a kernel has them, so that codes come out equal; sums in fp64.
    """
    f32 = numpy.float32
    (tokens, hq, _), (total, hkv, dv) = q.data.shape, v.data.shape
    out, lse = numpy.zeros((tokens, hq, dv)), numpy.full((hq, tokens), -numpy.inf)
    values = oracle.dequantize_fp64(Quantized(v.data, torch.tensor(1.0), v.format)).numpy()
    keys = oracle.dequantize_fp64(Quantized(k.data, torch.tensor(1.0), k.format)).numpy()
    queries = oracle.dequantize_fp64(Quantized(q.data, torch.ones(tokens, hq), q.format)).numpy()
    for i in range(tokens):
        for h in range(hq):
            position = total - tokens + i
            c = f32(q.scale[i, h]) * (f32(k.scale[h * hkv // hq]) * f32(scale / math.log(2)))
            x = (keys[: position + 1, h * hkv // hq] @ queries[i, h]).astype(f32) * c
            if window is not None:
                x[: max(0, position - window)] = -numpy.inf
            m, o, total_p = f32(-numpy.inf), numpy.zeros(dv), 0.0
            for start in range(0, len(x), config.tile):
                tile = x[start : start + config.tile]
                m_after = max(m, tile.max())
                if m_after == -numpy.inf:
                    continue
                alpha = 0.0 if m == -numpy.inf else 2.0 ** float(m - m_after)
                o, total_p, m = o * alpha, total_p * alpha, m_after
                for block in range(start, min(start + config.tile, len(x)), 64):
                    part = x[block : block + 64]
                    if part.max() == -numpy.inf:
                        continue
                    lift = -numpy.ceil(part.max() - m)
                    lift = min(lift, 126 - config.offset)
                    codes = codes_of((part - m) + (lift + f32(config.offset)), config)
                    p = E4M3[codes] * 2.0 ** -(float(lift) + config.offset)
                    o = o + p @ values[block : block + len(part), h * hkv // hq]
                    total_p += p.sum()
            if total_p > 0:
                out[i, h] = o / total_p * float(v.scale[h * hkv // hq])
                lse[h, i] = math.log(2) * (float(m) + math.log2(total_p))
    return out, lse


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("probabilities", ["lean", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_algorithm_key_by_key(kind: str, probabilities: str, tile: int, window: int | None) -> None:
    # int8 scores are exact in fp32 in any order of summation, so that the codes must agree.
    config = replace(INT8, probabilities=probabilities, tile=tile)
    q, k, v = operands(*inputs(330, 2, 1, kind=kind, seed=5, queries=40), config)
    out, lse = reference.attend(
        q, k, v, softmax_scale=0.09, causal=True, window=window, config=config, out_dtype=torch.float32
    )
    expected, expected_lse = written_out(q, k, v, 0.09, config, window)
    assert oracle.relative_rms(out, torch.from_numpy(expected)) < 3e-6
    torch.testing.assert_close(lse.double(), torch.from_numpy(expected_lse), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("offset,delta", [(8.0, -0.344), (4.0, 0.0), (0.0, -0.45), (-3.0, 0.2)])
def test_offset_and_delta(offset: float, delta: float) -> None:
    config = replace(INT8, offset=offset, delta=delta)
    q, k, v = operands(*inputs(200, 1, 1, seed=9, queries=20), config)
    out, _ = reference.attend(q, k, v, softmax_scale=0.09, causal=True, config=config, out_dtype=torch.float32)
    expected, _ = written_out(q, k, v, 0.09, config, None)
    assert oracle.relative_rms(out, torch.from_numpy(expected)) < 3e-6


@pytest.mark.parametrize("probabilities", ["lean", "exact"])
@pytest.mark.parametrize("offset", [8.0, 2.0, -6.0])
def test_every_p_is_the_specified_code(probabilities: str, offset: float) -> None:
    """From the largest P down through e4m3's subnormal numbers to zero."""
    config = replace(LEAN, probabilities=probabilities, offset=offset)
    x = torch.linspace(0, -24, 64 * 200)[torch.randperm(64 * 200)].view(100, 128)
    x[:, 0], x[:, 64] = 0, 0  # the maximum of both blocks: no lift but the offset
    p, factor, _ = block_probabilities(x.clone(), torch.full((100,), -torch.inf), config, torch.empty(x.numel()))
    y = x.view(100, 2, 64) + offset
    if probabilities == "exact":
        expected = torch.exp2(y).numpy().astype(ml_dtypes.float8_e4m3fn).astype(numpy.float32)
    else:
        expected = E4M3[codes_of(y.numpy(), config)].astype(numpy.float32)
    assert len(numpy.unique(expected)) > 8 * offset + 40
    value = p * factor[..., None] * 2.0**offset
    torch.testing.assert_close(value, torch.from_numpy(expected), rtol=0, atol=0)


# The rounding of P to three bits of mantissa alone: 2^-4 / sqrt(3) at most in one weight.
P_BOUND = {"exact": 0.045, "lean": 0.05, "none": 2e-6}


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 300),
    context=st.integers(0, 200),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    dim=st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128)]),
    kind=st.sampled_from(KINDS),
    preset=st.sampled_from(sorted(PRESETS)),
    tile=st.sampled_from([64, 128]),
    rotation=st.sampled_from(["hadamard", "signed", "none"]),
    window=st.one_of(st.none(), st.integers(0, 150)),
    causal=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_against_fp64_on_the_same_inputs(
    tokens, context, kv_heads, group, dim, kind, preset, tile, rotation, window, causal, seed
) -> None:
    config = replace(PRESETS[preset], tile=tile, rotation=rotation)
    q, k, v = inputs(
        tokens + context, kv_heads * group, kv_heads, dim[0], dim[1], kind=kind, seed=seed, queries=tokens
    )
    quantised = operands(q, k, v, config)
    call = {"softmax_scale": dim[0] ** -0.5, "causal": causal, "window": window}
    out, lse = reference.attend(*quantised, **call, config=config, out_dtype=torch.float32)
    expected, expected_lse = oracle.attend_fp64(*quantised, **call)
    assert out.shape == expected.shape and lse.shape == expected_lse.shape
    # An fp32 score is off by some 2^-24 of the sum of its terms' magnitudes, and so is a weight.
    magnitude = quantised[0].dequantize().abs().amax() * quantised[1].dequantize().abs().sum(-1).amax()
    slack = 1e-6 * float(magnitude) * dim[0] ** -0.5
    assert oracle.relative_rms(out, expected) <= P_BOUND[config.probabilities] + slack
    bound = 2e-6 if config.probabilities == "none" else 0.07
    same = (lse == expected_lse) | ((lse - expected_lse).abs() <= bound + slack + 1e-6 * expected_lse.abs())
    assert same.all()


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_lengths(preset: str, tokens: int) -> None:
    config = PRESETS[preset]
    quantised = operands(*inputs(tokens, 3, 1), config)
    out, lse = reference.attend(*quantised, softmax_scale=0.09, causal=True, config=config, out_dtype=torch.float32)
    expected, expected_lse = oracle.attend_fp64(*quantised, softmax_scale=0.09, causal=True)
    assert oracle.relative_rms(out, expected) <= P_BOUND[config.probabilities]
    assert float((lse - expected_lse).abs().max()) <= 0.07


def test_attention_takes_sequences_apart() -> None:
    q, k, v = inputs(200, 4, 2, seed=3)
    bounds_q, bounds_k = torch.tensor([0, 0, 7, 72, 200]), torch.tensor([0, 5, 12, 80, 200])
    out, lse = reference.attention(
        q, k, v, softmax_scale=0.1, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k, config=UNQUANTIZED
    )
    for a, b, c, d in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        if a == b:
            continue
        expected, expected_lse = oracle.attention_fp64(q[a:b], k[c:d], v[c:d], softmax_scale=0.1, causal=True)
        torch.testing.assert_close(out[a:b].double(), expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse[:, a:b].double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_scales_that_all_differ_are_applied() -> None:
    q, k, v = inputs(150, 4, 2, seed=11)
    scale_k, scale_v = torch.tensor([0.031, 0.017]), torch.tensor([0.011, 0.043])
    out, _ = reference.attention(q, k, v, softmax_scale=0.05, config=EXACT, k_scale=scale_k, v_scale=scale_v)
    expected, _ = oracle.attention_fp64(q, k, v, softmax_scale=0.05, causal=True)
    assert oracle.relative_rms(out, expected) < 0.06
    scalar, _ = reference.attention(q, k, v, softmax_scale=0.05, config=EXACT, k_scale=0.031, v_scale=0.011)
    assert oracle.relative_rms(scalar, expected) < 0.06


def test_more_queries_than_keys() -> None:
    """Queries are the last of the keys: the first ones stand before every key and see none."""
    q, k, v = inputs(40, 2, 1, seed=2, queries=100)
    out, lse = reference.attention(q, k, v, softmax_scale=0.1)
    assert (out[:60] == 0).all() and (lse[:, :60] == -torch.inf).all()
    expected, _ = oracle.attention_fp64(q[60:], k, v, softmax_scale=0.1, causal=True)
    assert oracle.relative_rms(out[60:], expected) < 0.08


def test_no_keys_and_no_queries() -> None:
    q, k, v = inputs(0, 2, 1, queries=3)
    out, lse = reference.attention(q, k, v, softmax_scale=0.1)
    assert (out == 0).all() and (lse == -torch.inf).all() and out.shape == (3, 2, 128)
    q, k, v = inputs(5, 2, 1, queries=0)
    out, lse = reference.attention(q, k, v, softmax_scale=0.1)
    assert out.shape == (0, 2, 128) and lse.shape == (2, 0)


def test_rotation_kinds_and_int8_reduce_the_error_of_outliers() -> None:
    """With outlier channels, as models have them, the Hadamard helps fp8 and int8 beats fp8."""
    q, k, v = inputs(500, 2, 1, seed=4)
    k[:, :, 5] += 12
    q[:, :, 5] += 6
    expected, _ = oracle.attention_fp64(q, k, v, softmax_scale=0.05, causal=True)
    error = {}
    for name, config in {
        "fp8": LEAN,
        "fp8 none": replace(LEAN, rotation="none"),
        "int8": INT8,
        "signed": replace(LEAN, rotation="signed"),
    }.items():
        config = replace(config, probabilities="none", v_format="none")
        error[name] = oracle.relative_rms(reference.attention(q, k, v, softmax_scale=0.05, config=config)[0], expected)
    assert error["fp8"] < 0.8 * error["fp8 none"] and error["signed"] < 0.8 * error["fp8 none"]
    assert error["int8"] < 0.6 * error["fp8"]


def test_products_of_the_fused_arithmetic_round_after_each_64_dimensions():
    """As two chained matrix instructions: fp32(fp32(sum of 64 exact products) + sum of the next 64)."""
    torch.manual_seed(3)
    a, b = (torch.randn(1, n, 128).mul(8).to(torch.float8_e4m3fn).float() for n in (5, 7))
    got = stepwise_products(a, b)
    for i in range(5):
        for j in range(7):
            terms = [x * y for x, y in zip(a[0, i].tolist(), b[0, j].tolist(), strict=True)]
            first = torch.tensor(math.fsum(terms[:64]), dtype=torch.float32).item()
            assert got[0, i, j].item() == torch.tensor(math.fsum([first, *terms[64:]]), dtype=torch.float32).item()
