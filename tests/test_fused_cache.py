"""Decode over the engine's fused cache against `reference.attend` on the last token, over shuffled blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from zyfa_backend import reference, reference_tiles
from zyfa_backend.config import PRESETS, AttentionConfig
from zyfa_backend.cpu import fused_cache, loops
from zyfa_backend.quantization import Quantized, e4m3_encode, quantize_kv, quantize_q, unpack
from zyfa_backend.rotation import tables

HQ, HKV, DIM = 6, 2, 128
SCALE = 0.09
K_SCALE = {"fp8_e4m3": torch.tensor([0.01, 0.02]), "int8": torch.tensor([0.035, 0.07]), "none": torch.ones(2)}
V_SCALE = {"fp8_e4m3": torch.tensor([0.015, 0.01]), "none": torch.ones(2)}


class Paged:
    """Sequences in a shuffled cache whose unused bytes are NaN codes."""

    def __init__(
        self, config: AttentionConfig, lengths: list[int], size: int, poison: int | None = None, operand: str = "v"
    ) -> None:
        torch.manual_seed(1)
        width = -(-max(lengths) // size)
        count = len(lengths) * width + 3
        self.lengths, self.config = lengths, config
        self.table = torch.randperm(count)[: len(lengths) * width].view(len(lengths), width).int()
        if config.quantized:
            self.cache = torch.full((count, HKV, size, 2 * DIM), 0x7F, dtype=torch.uint8)
        else:
            self.cache = torch.full((count, HKV, size, 2 * DIM), torch.nan, dtype=torch.bfloat16)
        self.stored = []
        for row, length in enumerate(lengths):
            k, v = torch.randn(2, length, HKV, DIM).bfloat16()
            if poison == row:
                (v if operand == "v" else k)[0] = torch.nan
            k = quantize_kv(k, K_SCALE[config.qk_format], config.qk_format, config.rotation)
            v = quantize_kv(v, V_SCALE[config.v_format], config.v_format)
            block = self.table[row].long()[torch.arange(length) // size]
            offset = torch.arange(length) % size
            self.cache[block, :, offset, :DIM] = k.view(torch.uint8) if config.quantized else k
            self.cache[block, :, offset, DIM:] = v
            self.stored.append((k, v))
        self.q = torch.randn(len(lengths), HQ, DIM).bfloat16()

    def decode(self, window: int | None, finite: bool) -> torch.Tensor:
        k_scale, v_scale = K_SCALE[self.config.qk_format], V_SCALE[self.config.v_format]
        return fused_cache.decode(
            self.q, self.cache, self.table, self.lengths, k_scale=k_scale, v_scale=v_scale, softmax_scale=SCALE,
            window=window, config=self.config, finite=finite,
        )

    def expected(self, window: int | None) -> torch.Tensor:
        rows = []
        for row, (k, v) in enumerate(self.stored):
            rows.append(reference.attend(
                quantize_q(self.q[row : row + 1], self.config),
                Quantized(k, K_SCALE[self.config.qk_format], self.config.qk_format),
                Quantized(v, V_SCALE[self.config.v_format], self.config.v_format),
                softmax_scale=SCALE, causal=True, window=window, config=self.config, out_dtype=torch.bfloat16,
            )[0])
        return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 0, 70])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("preset", PRESETS)
def test_equals_prefill_of_the_last_token(preset: str, size: int, window: int | None) -> None:
    paged = Paged(PRESETS[preset], [1, 63, 64, 65, 300, 1000], size)
    expected = paged.expected(window)
    for finite in (True, False):
        # One unit in the last place of bf16 at the size of the values: sums are taken in another order.
        torch.testing.assert_close(paged.decode(window, finite), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("preset", PRESETS)
def test_nan_stays_with_its_sequence(preset: str, operand: str) -> None:
    """The first key of the second sequence is NaN: that sequence sees it, the others do not."""
    paged = Paged(PRESETS[preset], [70, 80, 90], 16, 1, operand)
    out = paged.decode(None, finite=False)
    assert out[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], paged.expected(None)[[0, 2]], rtol=2**-7, atol=2**-9)


def test_alone_and_in_a_batch_bit_for_bit() -> None:
    paged = Paged(PRESETS["lean"], [5, 129, 700], 64)
    together = paged.decode(None, True)
    for row, length in enumerate(paged.lengths):
        alone = fused_cache.decode(
            paged.q[row : row + 1], paged.cache, paged.table[row : row + 1], [length], k_scale=K_SCALE["fp8_e4m3"],
            v_scale=V_SCALE["fp8_e4m3"], softmax_scale=SCALE, window=None, config=paged.config, finite=True,
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("block", [-1, 10_000])
def test_a_block_outside_the_cache_is_refused(block: int) -> None:
    paged = Paged(PRESETS["lean"], [5, 129], 64)
    paged.table[1, 1] = block
    with pytest.raises(ValueError, match=f"{block}.*cache of 9 blocks of 64"):
        paged.decode(None, True)


def test_too_short_a_table_is_refused() -> None:
    paged = Paged(PRESETS["lean"], [129], 64)
    paged.table = paged.table[:, :2]
    with pytest.raises(ValueError, match="too few blocks for sequences of \\[129\\]"):
        paged.decode(None, True)


@pytest.mark.parametrize("rotation", ["hadamard", "signed", "none"])
@pytest.mark.parametrize("preset", ["lean", "int8"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_written_bits_are_those_of_quantize_kv(dim: int, preset: str, rotation: str) -> None:
    config = replace(PRESETS[preset], rotation=rotation)
    torch.manual_seed(dim)
    # From subnormal codes to values that are cut off.
    k, v = (torch.randn(2, 40, HKV, dim) * torch.logspace(-3, 3, 40).view(40, 1, 1)).bfloat16()
    k[3, 0, 5], v[4, 1, 7], v[5, 0, 0] = torch.nan, torch.nan, torch.inf
    slots = torch.randperm(64)[:40]
    slots[[7, 20]] = -1
    k_scale, v_scale = K_SCALE[config.qk_format], V_SCALE["fp8_e4m3"]
    cache = torch.full((4, HKV, 16, 2 * dim), 0x55, dtype=torch.uint8)
    expected, live = cache.clone(), slots >= 0
    written = fused_cache.write(k, v, cache, slots, k_scale=k_scale, v_scale=v_scale, config=config)
    codes, lost = zip(
        quantize_kv(k[live], k_scale, config.qk_format, rotation, count_saturated=True),
        quantize_kv(v[live], v_scale, "fp8_e4m3", count_saturated=True),
        strict=True,
    )
    block, offset = slots[live] // 16, slots[live] % 16
    expected[block, :, offset, :dim], expected[block, :, offset, dim:] = codes[0].view(torch.uint8), codes[1]
    assert torch.equal(cache, expected)
    odd = dim if rotation != "none" else 1  # a rotation carries K's NaN to the whole head
    assert written == (38, sum(lost), min(odd, 128) + 2)


@pytest.mark.parametrize("values", [torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)])
def test_every_bf16_value_becomes_the_code_of_the_cast(values: torch.Tensor) -> None:
    cache = torch.zeros(1, 1, 512, 2 * 128, dtype=torch.uint8)
    tokens, one = values.view(512, 1, 128), torch.ones(1)
    config = AttentionConfig(rotation="none")
    fused_cache.write(tokens, tokens, cache, torch.arange(512), k_scale=one, v_scale=one, config=config)
    assert torch.equal(cache[0, 0, :, :128], e4m3_encode(tokens)[:, 0])


def test_a_slot_outside_the_cache_is_refused() -> None:
    k, one = torch.randn(1, HKV, DIM).bfloat16(), torch.ones(HKV)
    with pytest.raises(ValueError, match="up to 32; the cache has 2 blocks of 16"):
        fused_cache.write(
            k, k, torch.zeros(2, HKV, 16, 2 * DIM, dtype=torch.uint8), torch.tensor([32]), k_scale=one, v_scale=one,
            config=PRESETS["lean"],
        )


@pytest.mark.parametrize("preset", ["lean", "int8"])
def test_queries_have_the_bits_of_quantize_q(preset: str) -> None:
    config = PRESETS[preset]
    torch.manual_seed(3)
    q = (torch.randn(5, HQ, DIM) * torch.logspace(-30, 6, 5).view(5, 1, 1)).bfloat16()
    q[1], q[2, 3, 4] = 0, torch.nan
    values, scale = q.float().numpy(), np.empty((5, HQ), np.float32)
    kind = loops.INT8 if preset == "int8" else loops.E4M3
    loops.quantize_q(values, kind, tables(DIM, "hadamard"), values, scale)
    expected = quantize_q(q, config)
    torch.testing.assert_close(torch.from_numpy(scale), expected.scale, rtol=0, atol=0, equal_nan=True)
    finite = expected.scale.isfinite()
    decoded, factor = unpack(expected.data, config.qk_format)
    ours = torch.from_numpy(values) * (256 if preset == "lean" else 1)
    assert torch.equal(ours[finite], (decoded * factor)[finite])


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("preset", ["lean", "exact", "unquantized"])
def test_compiled_weights_are_the_references(preset: str, tile: int) -> None:
    """Rows that rise, that fall, that are masked at the start or throughout, and one with a NaN."""
    config = replace(PRESETS[preset], tile=tile)
    torch.manual_seed(tile)
    x = torch.randn(2, 40, 512) * torch.logspace(-1, 2, 40).view(40, 1)
    x[0, 1] += torch.linspace(0, 300, 512)
    x[0, 2] -= torch.linspace(0, 300, 512)
    x[0, 3, :100], x[0, 4], x[1, 5, 300] = -torch.inf, -torch.inf, torch.nan
    m = torch.full((2, 40), -torch.inf)
    m[1] = torch.randn(40) * 10
    ours, theirs, scratch = x.clone(), x.clone(), torch.empty(x.numel())
    total, m_after = fused_cache.weights(ours, m, config, scratch)
    expected_total, expected_m = reference_tiles.weights(theirs, m, config, scratch)
    assert torch.equal(m_after.nan_to_num(7), expected_m.nan_to_num(7))
    assert total[1, 5].isnan() and expected_total[1, 5].isnan()
    total[1, 5], expected_total[1, 5], ours[1, 5], theirs[1, 5] = 0, 0, 0, 0
    if preset == "lean":
        # The same codes; numba's exp2 and torch's, in the blocks' factors, differ in the last bit.
        torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=0)
    else:
        # Here exp2 comes before the rounding: where it falls on a tie of e4m3 a code moves by one.
        off = (ours - theirs).abs() > 1e-6 * theirs.abs()
        assert off.float().mean() < 1e-4
        torch.testing.assert_close(ours, theirs, rtol=2**-3, atol=1e-30)
    torch.testing.assert_close(total, expected_total, rtol=1e-4, atol=1e-30)
