"""A row's bits depend on its own keys alone: not on chunks, a cached prefix, a window's dead keys or the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_cases import KINDS, inputs, operands, rows, same_bits
from zyfa_backend import reference
from zyfa_backend.config import LEAN, PRESETS

PRESET = st.sampled_from(sorted(PRESETS))
TILE = st.sampled_from([64, 128])
WINDOW = st.one_of(st.none(), st.integers(0, 400))
HEADS = [(1, 1), (2, 1), (9, 3), (4, 4), (8, 1), (5, 5), (32, 8)]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 900),
    borders=st.lists(st.integers(1, 899), max_size=5),
    heads=st.sampled_from(HEADS),
    kind=st.sampled_from(KINDS),
    preset=PRESET,
    tile=TILE,
    window=WINDOW,
    seed=st.integers(0, 10**6),
)
def test_chunks_give_the_bits_of_the_whole(tokens, borders, heads, kind, preset, tile, window, seed) -> None:
    config = replace(PRESETS[preset], tile=tile)
    q, k, v = operands(*inputs(tokens, *heads, 64, kind=kind, seed=seed), config)
    call = {"softmax_scale": 0.12, "causal": True, "window": window, "config": config, "out_dtype": torch.float32}
    whole, whole_lse = reference.attend(q, k, v, **call)
    cuts = sorted({0, tokens, *(b for b in borders if b < tokens)})
    for start, stop in zip(cuts, cuts[1:], strict=False):
        out, lse = reference.attend(
            rows(q, slice(start, stop)), rows(k, slice(0, stop)), rows(v, slice(0, stop)), **call
        )
        assert same_bits(out, whole[start:stop]) and same_bits(lse, whole_lse[:, start:stop])


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("heads", HEADS)
def test_every_border_of_a_tile(heads: tuple[int, int], preset: str) -> None:
    config = PRESETS[preset]
    q, k, v = operands(*inputs(270, *heads, 128, seed=1), config)
    call = {"softmax_scale": 0.09, "causal": True, "config": config, "out_dtype": torch.bfloat16}
    whole, _ = reference.attend(q, k, v, **call)
    for border in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 269):
        first, _ = reference.attend(*(rows(x, slice(0, border)) for x in (q, k, v)), **call)
        second, _ = reference.attend(rows(q, slice(border, None)), k, v, **call)
        assert same_bits(torch.cat((first, second)), whole), border


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_query_alone_has_the_bits_it_has_among_others(preset: str) -> None:
    config = PRESETS[preset]
    q, k, v = operands(*inputs(1100, 3, 1, seed=2), config)
    call = {"softmax_scale": 0.09, "causal": True, "config": config, "out_dtype": torch.float32}
    whole, _ = reference.attend(q, k, v, **call)
    for i in (0, 1, 63, 64, 511, 512, 513, 1000, 1099):
        seen = slice(0, i + 1)
        alone, _ = reference.attend(rows(q, slice(i, i + 1)), rows(k, seen), rows(v, seen), **call)
        assert same_bits(alone, whole[i : i + 1]), i


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_batch_has_the_bits_of_its_sequences_alone(preset: str) -> None:
    config = PRESETS[preset]
    lengths = [1, 63, 64, 200, 65, 127, 500]
    parts = [inputs(n, 6, 2, seed=n) for n in lengths]
    q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    call = {"softmax_scale": 0.09, "config": config}
    out, lse = reference.attention(q, k, v, **call, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    for part, a, b in zip(parts, bounds, bounds[1:], strict=False):
        alone, alone_lse = reference.attention(*part, **call)
        assert same_bits(out[a:b], alone) and same_bits(lse[:, a:b], alone_lse)


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 800), window=st.integers(0, 700), preset=PRESET, seed=st.integers(0, 10**6))
def test_a_window_that_reaches_the_start_is_no_window(tokens: int, window: int, preset: str, seed: int) -> None:
    """Rows whose window holds all their keys; the tiles that the window skips for others hold nothing of theirs."""
    q, k, v = operands(*inputs(tokens, 2, 1, seed=seed), PRESETS[preset])
    call = {"softmax_scale": 0.09, "causal": True, "config": PRESETS[preset], "out_dtype": torch.float32}
    free, _ = reference.attend(q, k, v, **call)
    cut, _ = reference.attend(q, k, v, **call, window=window)
    same = min(tokens, window + 1)
    assert same_bits(cut[:same], free[:same])


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("window", [0, 1, 63, 64, 100, 300])
def test_keys_before_the_window_have_no_influence(preset: str, window: int) -> None:
    config = PRESETS[preset]
    q, k, v = operands(*inputs(700, 2, 1, seed=4), config)
    call = {"softmax_scale": 0.09, "causal": True, "config": config, "out_dtype": torch.float32, "window": window}
    expected, _ = reference.attend(rows(q, slice(600, None)), k, v, **call)
    k.data[: 600 - window] = 3
    v.data[: 600 - window] = 5
    out, _ = reference.attend(rows(q, slice(600, None)), k, v, **call)
    assert same_bits(out, expected)


def test_the_workspace_of_an_earlier_call_does_not_show() -> None:
    """Buffers are kept between calls, with what the last one left in them."""
    q, k, v = inputs(300, 2, 1, seed=7)
    clean, _ = reference.attention(q, k, v, softmax_scale=0.09)
    big = inputs(900, 2, 1, seed=8)
    reference.attention(*(torch.full_like(x, torch.nan) for x in big), softmax_scale=0.09)
    again, _ = reference.attention(q, k, v, softmax_scale=0.09)
    assert same_bits(again, clean)


def test_strides_of_the_operands_do_not_matter() -> None:
    q, k, v = inputs(150, 4, 2, seed=9)
    expected, _ = reference.attention(q, k, v, softmax_scale=0.09)
    fused = torch.cat((k, v), dim=-1)
    out, _ = reference.attention(
        q.transpose(0, 1).contiguous().transpose(0, 1), fused[..., :128], fused[..., 128:], softmax_scale=0.09
    )
    assert same_bits(out, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_with_several_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = operands(*inputs(800, 9, 3, seed=12), LEAN)
        call = {"softmax_scale": 0.09, "causal": True, "config": LEAN, "out_dtype": torch.bfloat16}
        whole, _ = reference.attend(q, k, v, **call)
        for border in (1, 129, 777):
            second, _ = reference.attend(rows(q, slice(border, None)), k, v, **call)
            assert same_bits(second, whole[border:])
    finally:
        torch.set_num_threads(before)
