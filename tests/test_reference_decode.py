"""Decode over a paged cache against prefill and fp64: shuffled and strided caches, windows, several new tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_cases import KINDS, LENGTHS, inputs, operands, rows, same_bits
from zyfa_backend import oracle, reference
from zyfa_backend.config import INT8, LEAN, PRESETS, UNQUANTIZED, AttentionConfig
from zyfa_backend.quantization import Quantized


class Cache:
    """Sequences in a paged cache whose other bytes are as bad as can be."""

    def __init__(self, config: AttentionConfig, lengths: list[int], block_size: int = 16, heads=(2, 1), **kind) -> None:
        self.config, self.lengths = config, lengths
        self.sequences = [inputs(n, *heads, **{"seed": i, **kind}) for i, n in enumerate(lengths)]
        together = [torch.cat(x) for x in zip(*self.sequences, strict=True)]
        _, k, v = operands(*together, config)
        self.k_scale, self.v_scale, self.formats = k.scale, v.scale, (k.format, v.format)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self.parts = [
            (rows(k, slice(a, b)), rows(v, slice(a, b))) for a, b in zip(starts, starts[1:], strict=False)
        ]
        wide = -(-max(lengths) // block_size)
        count = sum(-(-n // block_size) for n in lengths) + 5
        order = iter(torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist())
        self.table = torch.full((len(lengths), wide), -1, dtype=torch.int32)
        self.k, self.v = (self._filled(x, count, block_size) for x in (k, v))
        for i, (length, (k_part, v_part)) in enumerate(zip(lengths, self.parts, strict=True)):
            for j in range(-(-length // block_size)):
                self.table[i, j] = block = next(order)
                part = slice(j * block_size, min((j + 1) * block_size, length))
                self.k[block, : part.stop - part.start] = k_part.data[part]
                self.v[block, : part.stop - part.start] = v_part.data[part]

    @staticmethod
    def _filled(x: Quantized, count: int, block_size: int) -> torch.Tensor:
        bad = {"fp8_e4m3": 0x7F, "int8": -128, "none": torch.nan}[x.format]
        return torch.full((count, block_size, *x.data.shape[1:]), bad, dtype=x.data.dtype)

    def decode(self, q: torch.Tensor, chosen: list[int] | None = None, **rest):
        chosen = list(range(len(self.lengths))) if chosen is None else chosen
        return reference.decode(
            q, rest.pop("k", self.k), rest.pop("v", self.v), self.table[chosen],
            torch.tensor([self.lengths[i] for i in chosen], dtype=torch.int32),
            k_scale=self.k_scale, v_scale=self.v_scale, softmax_scale=0.09, config=self.config, **rest,
        )

    def prefill(self, i: int, new: int, window: int | None = None):
        """The last `new` tokens of sequence i by `attend`."""
        q, _, _ = operands(*self.sequences[i], self.config)
        return reference.attend(
            rows(q, slice(-new, None)), *self.parts[i], softmax_scale=0.09, causal=True, window=window,
            config=self.config, out_dtype=torch.bfloat16,
        )

    def last(self, new: int) -> torch.Tensor:
        return torch.cat([q[-new:] for q, _, _ in self.sequences])


def check_close(out: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor) -> None:
    """Up to the order of fp32 summation, which now and then moves one P by a step."""
    assert oracle.relative_rms(out, expected) < 0.01
    assert float((lse - expected_lse).abs().max()) < 0.01


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 400), min_size=1, max_size=4),
    new=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (3, 1), (8, 2), (9, 3), (8, 1)]),
    dim=st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128)]),
    block_size=st.sampled_from([8, 16, 48, 64, 256]),
    kind=st.sampled_from(KINDS),
    preset=st.sampled_from(sorted(PRESETS)),
    tile=st.sampled_from([64, 128]),
    window=st.one_of(st.none(), st.integers(0, 300)),
)
def test_decode_agrees_with_prefill(lengths, new, heads, dim, block_size, kind, preset, tile, window) -> None:
    config = replace(PRESETS[preset], tile=tile)
    cache = Cache(config, lengths, block_size, heads, dim=dim[0], v_dim=dim[1], kind=kind)
    out, lse = cache.decode(cache.last(new), window=window, q_len=new)
    for i in range(len(lengths)):
        part = slice(i * new, (i + 1) * new)
        expected, expected_lse = cache.prefill(i, new, window)
        slack = 5 if kind == "huge" else 1
        assert oracle.relative_rms(out[part], expected) < 0.01 * slack
        assert float((lse[:, part] - expected_lse).abs().max()) < 0.01 * slack


@pytest.mark.parametrize("preset", ["int8", "unquantized"])
def test_decode_agrees_to_the_last_bits_where_scores_are_exact(preset: str) -> None:
    """int8 scores are the same in any order; so are the codes, and only sums of P·V may differ in their last bits."""
    config = PRESETS[preset]
    for length in (*LENGTHS, 2048):
        cache = Cache(config, [length], heads=(9, 3))
        out, lse = cache.decode(cache.last(1))
        expected, expected_lse = cache.prefill(0, 1)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=2**-7)
        torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_decode_against_fp64(preset: str) -> None:
    cache = Cache(PRESETS[preset], [1000, 64], heads=(9, 3))
    out, lse = cache.decode(cache.last(1))
    for i in range(2):
        q, _, _ = operands(*cache.sequences[i], cache.config)
        expected, expected_lse = oracle.attend_fp64(
            rows(q, slice(-1, None)), *cache.parts[i], softmax_scale=0.09, causal=True
        )
        assert oracle.relative_rms(out[i : i + 1], expected) < (0.004 if preset == "unquantized" else 0.05)
        assert float((lse[:, i : i + 1] - expected_lse).abs().max()) < 0.05


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_batch_does_not_matter(preset: str) -> None:
    cache = Cache(PRESETS[preset], [300, 5, 64, 129], heads=(6, 2))
    q = cache.last(1)
    together, together_lse = cache.decode(q)
    for i in range(4):
        alone, lse = cache.decode(q[i : i + 1], [i])
        assert same_bits(alone, together[i : i + 1]) and same_bits(lse, together_lse[:, i : i + 1])


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_equal_values_come_back_unchanged(preset: str) -> None:
    for kind in KINDS:
        cache = Cache(PRESETS[preset], [1, 500, 2000], kind=kind)
        one = torch.zeros_like(cache.v)
        one[:] = 0x38 if one.dtype == torch.uint8 else 1  # 0x38 is 1.0 in e4m3
        cache.v_scale = torch.ones_like(cache.v_scale)
        out, _ = cache.decode(cache.last(1), v=one)
        assert (out == 1).all()


def test_caches_of_any_strides_and_byte_types() -> None:
    for config in (LEAN, INT8, UNQUANTIZED):
        cache = Cache(config, [200, 77], heads=(4, 2))
        q = cache.last(1)
        expected, _ = cache.decode(q)
        by_head = torch.cat((cache.k.view(cache.v.dtype), cache.v), dim=-1).transpose(1, 2).contiguous()
        k, v = (part.transpose(1, 2) for part in by_head.split(128, dim=-1))
        k = k if config.qk_format == "int8" else k.view(cache.k.dtype)
        out, _ = cache.decode(q, k=k, v=v)
        assert same_bits(out, expected)
        stacked = torch.stack((cache.k.view(cache.v.dtype), cache.v), dim=1)
        out, _ = cache.decode(q, k=stacked[:, 0].view(cache.k.dtype), v=stacked[:, 1])
        assert same_bits(out, expected)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("operand", ["k", "v"])
def test_nan_in_one_sequence_stays_there(preset: str, operand: str) -> None:
    cache = Cache(PRESETS[preset], [150, 90], heads=(4, 2))
    q = cache.last(1)
    clean, _ = cache.decode(q)
    store = getattr(cache, operand)
    bad = {torch.uint8: 0xFF, torch.int8: -128, torch.bfloat16: torch.nan}[store.dtype]
    store[int(cache.table[0, 2]), 3, 1, 7] = bad
    out, _ = cache.decode(q)
    assert same_bits(out[1], clean[1]) and same_bits(out[0, :2], clean[0, :2])
    if operand == "k":
        assert torch.isnan(out[0, 2:]).all()
    else:
        assert torch.isnan(out[0, 2:]).nonzero()[:, 1].tolist() == [7, 7]
    unseen, _ = cache.decode(q, window=20)
    assert not torch.isnan(unseen).any()


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("operand", ["k", "v"])
def test_nan_in_a_masked_key_is_not_seen(preset: str, operand: str) -> None:
    """By earlier ones of several new tokens, and by a window that ends within the same blocks."""
    cache = Cache(PRESETS[preset], [150], heads=(4, 2))
    q = cache.last(3)
    store = getattr(cache, operand)
    bad = {torch.uint8: 0x7F, torch.int8: -128, torch.bfloat16: torch.nan}[store.dtype]
    clean, _ = cache.decode(q, q_len=3, window=100)
    store[int(cache.table[0, 149 // 16]), 149 % 16] = bad
    store[int(cache.table[0, 2]), 5] = bad  # position 37; the windows begin at 47
    out, _ = cache.decode(q, q_len=3, window=100)
    assert same_bits(out[:2], clean[:2]) and torch.isnan(out[2]).all()


def test_gather() -> None:
    cache = Cache(LEAN, [77])
    assert torch.equal(reference.gather(cache.k, cache.table[0], 77), cache.parts[0][0].data)
    assert reference.gather(cache.k, cache.table[0], 0).shape == (0, 1, 128)
    with pytest.raises(reference.AttentionError, match="length=81 needs 6 blocks of 16; the row has 5"):
        reference.gather(cache.k, cache.table[0], 81)
