"""Decode over the engine's fused cache against `reference.attend` on the last token, over shuffled blocks."""

from __future__ import annotations

import pytest
import torch

from zyfa_backend import reference
from zyfa_backend.config import PRESETS, AttentionConfig
from zyfa_backend.decode import fused_cache
from zyfa_backend.quantization import Quantized, quantize_kv, quantize_q

HQ, HKV, DIM = 6, 2, 128
SCALE = 0.09
K_SCALE = {"fp8_e4m3": torch.tensor([0.01, 0.02]), "int8": torch.tensor([0.035, 0.07]), "none": torch.ones(2)}
V_SCALE = {"fp8_e4m3": torch.tensor([0.015, 0.01]), "none": torch.ones(2)}


class Paged:
    """Sequences in a shuffled cache whose unused bytes are NaN codes."""

    def __init__(self, config: AttentionConfig, lengths: list[int], size: int, poison: int | None = None) -> None:
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
                v[0] = torch.nan
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


@pytest.mark.parametrize("preset", ["lean", "int8", "unquantized"])
def test_nan_stays_with_its_sequence(preset: str) -> None:
    """The first key of the second sequence has a NaN value: that sequence sees it, the others do not."""
    paged = Paged(PRESETS[preset], [70, 80, 90], 16, poison=1)
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
