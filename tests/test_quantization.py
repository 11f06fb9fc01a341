"""The e4m3 codec against ml_dtypes, scales, clamping, and what becomes of NaN and infinity."""

from __future__ import annotations

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.attention_cases import same_bits
from zyfa_backend.config import EXACT, INT8, LEAN, LEAN_NO_ROTATION, UNQUANTIZED
from zyfa_backend.quantization import (
    QuantizationError,
    Quantized,
    calibrate_scale,
    count_saturated,
    e4m3_decode,
    e4m3_encode,
    quantize_kv,
    quantize_q,
    unpack,
)
from zyfa_backend.rotation import CHUNK, rotate

CODES = torch.arange(256, dtype=torch.uint8)
FLOATS = st.floats(width=32, allow_nan=False, allow_subnormal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decode_of_every_code(dtype: torch.dtype) -> None:
    expected = torch.from_numpy(CODES.numpy().view(ml_dtypes.float8_e4m3fn).astype(numpy.float32))
    decoded = e4m3_decode(CODES, dtype)
    assert decoded.dtype == dtype
    torch.testing.assert_close(decoded.float(), expected, rtol=0, atol=0, equal_nan=True)
    number = ~torch.isnan(expected)
    assert torch.equal(torch.signbit(decoded[number]), torch.signbit(expected[number])), "-0 is not 0"
    assert int(torch.isnan(decoded).sum()) == 2


def test_decode_of_many_shapes_and_strides() -> None:
    data = torch.randint(0, 256, (CHUNK // 64 + 3, 2, 96), dtype=torch.uint8)
    table = torch.from_numpy(CODES.numpy().view(ml_dtypes.float8_e4m3fn).astype(numpy.float32))
    for part in (data, data[:, :, ::2], data.transpose(0, 1), data[:0], data[5, 1, 7]):
        torch.testing.assert_close(e4m3_decode(part), table[part.long()], rtol=0, atol=0, equal_nan=True)


def test_every_code_survives_a_round_trip() -> None:
    again = e4m3_encode(e4m3_decode(CODES))
    number = (CODES & 0x7F) != 0x7F
    assert torch.equal(again[number], CODES[number])
    assert ((again[~number] & 0x7F) == 0x7F).all()


@settings(max_examples=300, deadline=None)
@given(arrays(numpy.float32, st.integers(1, 40), elements=FLOATS))
def test_encode_of_random_floats(x: numpy.ndarray) -> None:
    expected = numpy.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
    assert numpy.array_equal(e4m3_encode(torch.from_numpy(x)).numpy(), expected)


def test_encode_of_halfway_values_goes_to_even() -> None:
    values = torch.sort(e4m3_decode(CODES[:127])).values
    middle = (values[1:] + values[:-1]) / 2
    for offset in (-1, 0, 1):
        x = (middle.view(torch.int32) + offset).view(torch.float32)
        expected = x.numpy().astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
        assert numpy.array_equal(e4m3_encode(x).numpy(), expected)


def test_encode_saturates_and_keeps_nan() -> None:
    x = torch.tensor([448.0, 463.0, 464.0, 480.0, 1e30, torch.inf, -torch.inf, -449.0])
    assert e4m3_decode(e4m3_encode(x)).tolist() == [448.0] * 6 + [-448.0] * 2
    assert torch.isnan(e4m3_decode(e4m3_encode(torch.tensor([torch.nan, -torch.nan])))).all()


@pytest.mark.parametrize("config", [LEAN, LEAN_NO_ROTATION, INT8, EXACT])
@pytest.mark.parametrize("tokens", [1, 5, 700])
def test_quantize_q(config, tokens: int) -> None:
    torch.manual_seed(1)
    q = torch.randn(tokens, 3, 128).bfloat16() * torch.logspace(-8, 8, tokens * 3).view(tokens, 3, 1)
    q = q.bfloat16()
    quantized = quantize_q(q, config)
    largest = 448.0 if config.qk_format == "fp8_e4m3" else 127.0
    x = rotate(q, config.rotation).double()
    torch.testing.assert_close(quantized.scale.double(), x.abs().amax(-1) / largest, rtol=1e-6, atol=0)
    error = (quantized.dequantize().double() - x).abs()
    step = quantized.scale.double()[..., None]
    # Half a step: 2^-4 of the value in e4m3 down to 2^-10 scales, half a scale in int8.
    bound = torch.maximum(x.abs() / 16, step * 2**-10) if largest == 448 else step / 2
    assert (error <= bound * (1 + 1e-5)).all()
    assert float(unpack(quantized.data, quantized.format)[0].abs().max()) > 0


@pytest.mark.parametrize("config", [LEAN, LEAN_NO_ROTATION, INT8])
def test_bits_of_a_token_do_not_depend_on_the_others(config) -> None:
    x = torch.randn(CHUNK // 256 + 50, 2, 128).bfloat16()
    whole, scale = quantize_q(x, config), torch.tensor([0.01, 0.02])
    stored = quantize_kv(x, scale, config.qk_format, config.rotation)
    for part in (slice(0, 1), slice(7, 9), slice(400, 555)):
        alone = quantize_q(x[part], config)
        assert torch.equal(alone.data, whole.data[part]) and same_bits(alone.scale, whole.scale[part])
        assert torch.equal(quantize_kv(x[part], scale, config.qk_format, config.rotation), stored[part])


@pytest.mark.parametrize("config", [LEAN, LEAN_NO_ROTATION, INT8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_row_of_q_poisons_itself_alone(config, bad: float) -> None:
    q = torch.randn(6, 2, 128).bfloat16()
    good = quantize_q(q, config)
    q[3, 1, 50] = bad
    poisoned = quantize_q(q, config)
    assert torch.isnan(poisoned.scale).nonzero().tolist() == [[3, 1]]
    assert torch.isnan(poisoned.dequantize()[3, 1]).all()
    keep = torch.ones(6, 2, dtype=torch.bool)
    keep[3, 1] = False
    assert torch.equal(poisoned.data[keep], good.data[keep]) and torch.equal(poisoned.scale[keep], good.scale[keep])


@pytest.mark.parametrize("config", [LEAN, INT8])
def test_zero_and_tiny_rows(config) -> None:
    q = torch.zeros(3, 1, 128)
    q[1] = 1e-42
    q[2, 0, 0] = 1e-30
    quantized = quantize_q(q, config)
    assert quantized.scale[0, 0] == 1 and torch.isfinite(quantized.scale).all() and (quantized.scale > 0).all()
    assert (quantized.dequantize()[0] == 0).all() and torch.isfinite(quantized.dequantize()).all()
    torch.testing.assert_close(quantized.dequantize()[2], rotate(q[2], "hadamard"), rtol=0.07, atol=0)


def test_unquantised_q_keeps_its_dtype() -> None:
    q = torch.randn(4, 2, 128).bfloat16()
    quantized = quantize_q(q, UNQUANTIZED)
    assert quantized.format == "none" and torch.equal(quantized.data, q) and (quantized.scale == 1).all()


def test_static_scale_per_head_and_saturation() -> None:
    x = torch.full((4, 2, 64), 3.0)
    x[1, 0, 5], x[2, 1, 6], x[3, 1, 7] = 460.0, -500.0, 1e9
    data, clipped = quantize_kv(x, torch.tensor([1.0, 0.5]), "fp8_e4m3", count_saturated=True)
    # 460 rounds to 448 whether clamped or not; -500 and 1e9 at scale 0.5 do not fit.
    assert clipped == 2 == count_saturated(x, torch.tensor([1.0, 0.5]), "fp8_e4m3")
    values = e4m3_decode(data)
    assert (values[0, 0] == 3).all() and (values[0, 1] == 6).all()
    assert values[1, 0, 5] == 448 and values[2, 1, 6] == -448 and values[3, 1, 7] == 448
    data, clipped = quantize_kv(x, 4.0, "int8", count_saturated=True)
    assert clipped == 1 and data[1, 0, 5] == 115 and data[2, 1, 6] == -125 and data[3, 1, 7] == 127
    assert data.min() >= -127
    assert quantize_kv(x, 1.0, "none") is x


def test_nan_and_infinity_in_k_and_v() -> None:
    x = torch.ones(3, 1, 64)
    x[1, 0, 2], x[2, 0, 3], x[2, 0, 4] = torch.nan, torch.inf, -torch.inf
    values, _ = unpack(quantize_kv(x, 1.0, "int8"), "int8")
    assert torch.isnan(values).nonzero().tolist() == [[1, 0, 2]]
    assert values[2, 0, 3] == 127 and values[2, 0, 4] == -127
    values = e4m3_decode(quantize_kv(x, 1.0, "fp8_e4m3"))
    assert torch.isnan(values).nonzero().tolist() == [[1, 0, 2]]
    assert values[2, 0, 3] == 448 and values[2, 0, 4] == -448


def test_calibration() -> None:
    x = torch.randn(2000, 3, 128).bfloat16()
    expected = x.float().abs().amax(dim=(0, 2))
    torch.testing.assert_close(calibrate_scale(x), expected / 448)
    torch.testing.assert_close(calibrate_scale(x, 1.5, format="int8"), expected * 1.5 / 127)
    rotated = rotate(x, "hadamard").abs().amax(dim=(0, 2))
    torch.testing.assert_close(calibrate_scale(x, rotation="hadamard"), rotated / 448)
    assert count_saturated(x, calibrate_scale(x), "fp8_e4m3") == 0
    x[5, 1, 3], x[6, 1, 4] = torch.nan, -torch.inf
    x[:, 2] = 0
    scale = calibrate_scale(x)
    assert torch.isfinite(scale).all() and scale[2] == 1
    torch.testing.assert_close(scale[0], expected[0] / 448)
    assert calibrate_scale(x[:0]).tolist() == [1, 1, 1]


def test_dequantize_scales() -> None:
    data = torch.tensor([[[2, -4]], [[6, 8]]], dtype=torch.int8)
    assert Quantized(data, torch.tensor(0.5), "int8").dequantize().tolist() == [[[1, -2]], [[3, 4]]]
    per_head = Quantized(data.view(1, 2, 2), torch.tensor([0.5, 2.0]), "int8")
    assert per_head.dequantize().tolist() == [[[1, -2], [12, 16]]]
    per_row = Quantized(data, torch.tensor([[1.0], [3.0]]), "int8")
    assert per_row.dequantize().tolist() == [[[2, -4]], [[18, 24]]]


def test_errors_name_what_is_accepted() -> None:
    x = torch.zeros(2, 3, 64)
    with pytest.raises(QuantizationError, match="'fp4' is not accepted; choose one of fp8_e4m3, int8, none"):
        quantize_kv(x, 1.0, "fp4")
    with pytest.raises(QuantizationError, match=r"scale is \[2\]; expected a scalar or \[3\]"):
        quantize_kv(x, torch.ones(2), "fp8_e4m3")
    with pytest.raises(QuantizationError, match=r"got \[3, 64\]"):
        quantize_kv(x[0], 1.0, "fp8_e4m3")
    with pytest.raises(QuantizationError, match="torch.int64"):
        quantize_q(x.long(), LEAN)
    with pytest.raises(QuantizationError, match="dtype torch.int8; expected torch.uint8"):
        Quantized(x.to(torch.int8), torch.tensor(1.0), "fp8_e4m3")
    with pytest.raises(QuantizationError, match="headroom=0"):
        calibrate_scale(x, 0)
    with pytest.raises(QuantizationError, match="has no scale"):
        calibrate_scale(x, format="none")
