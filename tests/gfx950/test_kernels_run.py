"""The fp8 head-dim-128 kernels on the emulator against the reference and fp64, and the properties of the numerics."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import fp8_model
import numpy as np
import pytest
import torch
from fp8_cases import expected, gaussian, launch

from zyfa_backend import kernel_run
from zyfa_backend.quantization import Quantized

# Lengths around a block, a tile and a workgroup; heads with and without sharing; contexts that shift the diagonal.
SHAPES = [
    (1, 1, 1, 0), (1, 4, 1, 512), (63, 3, 1, 1), (64, 1, 1, 77), (65, 4, 1, 0), (127, 1, 1, 1), (128, 1, 1, 0),
    (255, 1, 1, 77), (256, 3, 1, 0), (257, 9, 3, 1), (300, 1, 1, 512), (1000, 1, 1, 0),
]  # fmt: skip


@cache
def outcome(shape, causal, lean, kind):
    seq, hq, hkv, context = shape
    p = gaussian(seq, hq, hkv, context, causal=causal, lean=lean, kind=kind)
    ((out, lse),) = launch([p])
    return p, out, lse


@pytest.mark.parametrize("kind", ["gaussian", "peaked"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_the_references_own(shape, causal, lean, kind):
    p, out, lse = outcome(shape, causal, lean, kind)
    result = kernel_run.judge([p], [(out, lse)])
    assert result["rel_rms"] == pytest.approx(result["rel_rms_reference"], rel=0.02)
    assert result["beyond_bf16"] == 0
    assert result["lse_max_abs"] < 1e-5


@pytest.mark.parametrize("kind", ["gaussian", "peaked"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_is_the_models_rounded_to_bf16(shape, causal, lean, kind):
    """A second opinion, in numpy and fp64, that shares nothing with the reference: one bf16 step, and LSE in fp32."""
    p, out, lse = outcome(shape, causal, lean, kind)
    model, model_lse = fp8_model.attend(p)
    rounded = torch.from_numpy(model).bfloat16().double().numpy()
    # Sums are formed in fp32 in the kernel: next to zero its last bit counts, hence the absolute term.
    close = 2.0 ** (np.floor(np.log2(np.abs(rounded) + 2.0**-126)) - 7) + 1e-6
    assert (np.abs(out.double().numpy() - rounded) <= close).all()
    assert np.abs(lse.numpy() - model_lse).max() < 1e-5


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
@pytest.mark.parametrize("scale", [1.0, 6.0, 60.0])
def test_v_of_ones_gives_exactly_one(causal, lean, scale):
    """Weights sum to one however peaked: the sum divides the same rounded P that multiply V."""
    p = gaussian(270, 1, 1, 130, causal=causal, lean=lean, kind="ones")
    p = replace(p, q=Quantized(p.q.data, p.q.scale * scale, p.q.format))
    ((out, _),) = launch([p])
    assert (out == 1).all()


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
def test_rising_maximum_in_every_block(lean):
    """Keys that grow along the sequence: the maximum rises at every tile and everything before is rescaled."""
    p = gaussian(64, 1, 1, 600, lean=lean)
    growth = torch.linspace(0.05, 1, 664)[:, None, None]
    k = p.k.data.view(torch.float8_e4m3fn).float()
    k = (k.abs() * growth * p.q.data[:1].view(torch.float8_e4m3fn).float().sign()).to(torch.float8_e4m3fn)
    q = p.q.data.view(torch.float8_e4m3fn).float().abs() * p.q.data[:1].view(torch.float8_e4m3fn).float().sign()
    p = replace(
        p,
        q=Quantized(q.to(torch.float8_e4m3fn).view(torch.uint8), p.q.scale, p.q.format),
        k=Quantized(k.view(torch.uint8), p.k.scale, p.k.format),
    )
    ((out, lse),) = launch([p])
    ref, ref_lse = expected(p)
    assert torch.allclose(out.float(), ref.float(), rtol=2**-7, atol=1e-6)
    assert (lse - ref_lse).abs().max() < 1e-5


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
def test_packed_sequences_give_the_bits_of_each_alone(lean):
    problems = [
        gaussian(seq, 3, 1, context, lean=lean, seed=n)
        for n, (seq, context) in enumerate([(70, 0), (1, 300), (257, 5), (64, 64)])
    ]
    problems = [
        replace(p, k=replace(p.k, scale=problems[0].k.scale), v=replace(p.v, scale=problems[0].v.scale))
        for p in problems
    ]
    together = launch(problems)
    for p, (out, lse) in zip(problems, together, strict=True):
        ((alone, alone_lse),) = launch([p])
        assert torch.equal(out, alone) and torch.equal(lse, alone_lse)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
def test_chunked_prefill_gives_the_bits_of_the_whole(lean):
    whole = gaussian(300, 1, 1, 0, lean=lean)
    ((out, lse),) = launch([whole])
    for start, stop in ((0, 130), (130, 131), (131, 300)):
        part = replace(
            whole,
            q=Quantized(whole.q.data[start:stop], whole.q.scale[start:stop], whole.q.format),
            k=Quantized(whole.k.data[:stop], whole.k.scale, whole.k.format),
            v=Quantized(whole.v.data[:stop], whole.v.scale, whole.v.format),
        )
        ((piece, piece_lse),) = launch([part])
        assert torch.equal(piece, out[start:stop]) and torch.equal(piece_lse, lse[:, start:stop])


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
@pytest.mark.parametrize("page", [8, 16, 64, 128, 256])
def test_shuffled_pages_give_the_bits_of_packed_keys(page, lean):
    problems = [
        gaussian(seq, 2, 1, context, lean=lean, seed=n)
        for n, (seq, context) in enumerate([(70, 0), (1, 300), (33, 500)])
    ]
    problems = [
        replace(p, k=replace(p.k, scale=problems[0].k.scale), v=replace(p.v, scale=problems[0].v.scale))
        for p in problems
    ]
    for (out, lse), (paged, paged_lse) in zip(launch(problems), launch(problems, page=page), strict=True):
        assert torch.equal(out, paged) and torch.equal(lse, paged_lse)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
@pytest.mark.parametrize("window", [0, 1, 31, 128, 200, 10_000])
def test_sliding_window(window, lean, causal):
    p = gaussian(300, 1, 1, 333, lean=lean, causal=causal)
    ((out, lse),) = launch([p], window=window)
    model, model_lse = fp8_model.attend(p, window)
    rounded = torch.from_numpy(model).bfloat16().double().numpy()
    close = 2.0 ** (np.floor(np.log2(np.abs(rounded) + 2.0**-126)) - 7) + 1e-6
    assert (np.abs(out.double().numpy() - rounded) <= close).all()
    assert np.abs(lse.numpy() - model_lse).max() < 1e-5
    ref, ref_lse = expected(p, window)
    assert torch.allclose(out.float(), ref.float(), rtol=2**-7, atol=1e-6) and (lse - ref_lse).abs().max() < 1e-5
    if window == 10_000:
        ((whole, whole_lse),) = launch([p])
        assert torch.equal(out, whole) and torch.equal(lse, whole_lse)


def test_a_window_skips_the_tiles_before_it():
    """Work follows the window, not the context: the first tiles are never touched, so what they hold doesn't matter."""
    p = gaussian(64, 1, 1, 1000)
    ((out, _),) = launch([p], window=100)
    p.v.data[:768] = 0x7F  # NaN; tiles of 128 keys before key 1000 - 100
    p.k.data[:768] = 0x7F
    ((same, _),) = launch([p], window=100)
    assert torch.equal(out, same)


def test_strides_may_skip_other_heads_and_lse_may_be_left_out():
    p = gaussian(100, 2, 1, 30)
    ((dense, _),) = launch([p])
    ((padded, none),) = launch([p], pad_heads=3, want_lse=False)
    assert torch.equal(dense, padded) and none is None


def test_heads_that_fill_the_dies_are_all_computed():
    """Eight query heads take the interleaved order of heads."""
    p = gaussian(40, 8, 2, 0)
    ((out, _),) = launch([p])
    assert torch.allclose(out.float(), expected(p)[0].float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
def test_rows_without_a_visible_key_give_zero_and_minus_infinity(lean):
    """More queries than keys: the first rows stand before every key; a sequence may have no key at all."""
    some, none = gaussian(70, 1, 1, 0, lean=lean), gaussian(5, 1, 1, 0, lean=lean)

    def first(p, n):
        return replace(
            p, k=Quantized(p.k.data[:n], p.k.scale, p.k.format), v=Quantized(p.v.data[:n], p.v.scale, p.v.format)
        )

    (out, lse), (empty, empty_lse) = launch([first(some, 20), first(none, 0)])
    assert (out[:50] == 0).all() and torch.isneginf(lse[:, :50]).all()
    assert torch.isfinite(lse[:, 50:]).all() and (out[50:] != 0).any()
    assert (empty == 0).all() and torch.isneginf(empty_lse).all()


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
def test_nan_stays_in_its_row_and_request(lean):
    clean, bad = gaussian(150, 2, 1, 20, lean=lean), gaussian(150, 2, 1, 20, lean=lean, seed=1)
    bad = replace(bad, k=replace(bad.k, scale=clean.k.scale), v=replace(bad.v, scale=clean.v.scale))
    ((alone, _),) = launch([clean])
    ((before, _),) = launch([bad])
    bad.q.data[3, 0, 5] = 0x7F
    bad.q.scale[7, 1] = float("nan")
    bad.k.data[100, 0, 9] = 0xFF
    (hurt, lse), (out, _) = launch([bad, clean])
    assert torch.equal(out, alone)
    nan = torch.isnan(hurt).all(-1)
    rows = torch.arange(150)[:, None]
    assert torch.equal(
        nan,
        (rows + 20 >= 100)
        | torch.tensor([[False, False]])
        | ((rows == 3) & torch.tensor([[True, False]]))
        | ((rows == 7) & torch.tensor([[False, True]])),
    )
    assert torch.equal(hurt[~nan], before[~nan])
    assert torch.equal(torch.isnan(lse.T), nan)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
def test_the_same_bits_when_every_load_takes_its_time(lean):
    """Delayed memory poisons what is loaded until it is waited for: a missing wait or barrier would show."""
    p = gaussian(300, 1, 1, 400, lean=lean)
    ((out, lse),) = launch([p])
    ((late, late_lse),) = launch([p], delayed=True)
    assert torch.equal(out, late) and torch.equal(lse, late_lse)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
def test_permuting_the_keys_changes_nothing_beyond_rounding(lean):
    p = gaussian(32, 1, 1, 268, causal=False, lean=lean)
    order = torch.from_numpy(np.random.default_rng(5).permutation(300))
    shuffled = replace(p, k=replace(p.k, data=p.k.data[order]), v=replace(p.v, data=p.v.data[order]))
    ((out, lse),) = launch([p])
    ((other, other_lse),) = launch([shuffled])
    exact, _ = kernel_run.in_fp64(p)
    size = np.sqrt((exact**2).mean())
    assert np.sqrt(((out - other).double().numpy() ** 2).mean()) < 0.04 * size
    assert (lse - other_lse).abs().max() < 0.03


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "exact"])
def test_lse_of_two_parts_merges_to_the_whole(lean):
    p = gaussian(32, 1, 1, 224, causal=False, lean=lean)
    ((out, lse),) = launch([p])
    parts = [
        replace(p, k=replace(p.k, data=p.k.data[cut]), v=replace(p.v, data=p.v.data[cut]))
        for cut in (slice(0, 128), slice(128, 256))
    ]
    pieces = [launch([part])[0] for part in parts]
    weights = torch.softmax(torch.stack([s for _, s in pieces]), 0)
    merged = sum(w.T[..., None] * o.float() for w, (o, _) in zip(weights, pieces, strict=True))
    assert (torch.logsumexp(torch.stack([s for _, s in pieces]), 0) - lse).abs().max() < 0.02
    assert (merged - out.float()).abs().max() < 0.03 * out.float().abs().max()


def test_output_lies_inside_the_hull_of_v():
    p = gaussian(200, 1, 1, 0, kind="peaked")
    ((out, _),) = launch([p])
    v = p.v.data.view(torch.float8_e4m3fn).float() * p.v.scale[:, None]
    low, high = torch.cummin(v, 0).values, torch.cummax(v, 0).values
    slack = 2.0**-8 * v.abs().max()
    assert (out.float() >= low - slack).all() and (out.float() <= high + slack).all()


@pytest.mark.parametrize("heads", [(257, 1), (1000, 125), (1024, 16)])
def test_many_heads_find_their_keys(heads):
    """The last KV heads differ from the others, so a wrong one is another answer."""
    p = gaussian(1, *heads, 20, causal=False, lean=True, kind="gaussian")
    ((out, _),) = launch([p])
    assert torch.allclose(out.float(), expected(p)[0].float(), rtol=2**-7, atol=1e-6)


def test_the_kernels_division_by_the_group_is_exact_wherever_a_launch_is_accepted():
    from zyfa_kernels.runtime.attention import LaunchError, _group_magic

    for q_heads in range(1, 1025):
        for group in (g for g in range(1, q_heads + 1) if q_heads % g == 0):
            try:
                factor = _group_magic(q_heads, group)
            except LaunchError:
                assert group > 64 and group & (group - 1) and group < q_heads
            else:
                assert [head * factor >> 16 for head in range(q_heads)] == [head // group for head in range(q_heads)]
