"""`prefill` against the reference and against the specification, on a GPU or under Triton's interpreter.

Without a GPU these tests run where TRITON_INTERPRET=1 was set before triton was imported: see
test_prefill_interpreted.py. The interpreter and the int8 products of a GPU sum Q·K exactly. The FP8 tensor cores of
Hopper keep some 14 bits of a sum, which moves scores and so some codes of P: there the comparison is looser.
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import pytest
import torch

from tests.attention_cases import rows, same_bits
from zyfa_backend.oracle import dequantize_fp64, relative_rms

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from zyfa_kernels.triton import prefill_call  # noqa: E402
from zyfa_kernels.triton.prefill import PrefillError, prefill  # noqa: E402

from tests.triton import specification  # noqa: E402
from tests.triton.problems import SCALE, Batch, batch, expected, run, shares_of_heads, with_config  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
RAGGED = [(1, 130), (70, 70), (5, 200)]


def close(out: torch.Tensor, ref: torch.Tensor, qk_format: str) -> None:
    """Equal up to a step of bf16 in all but 1 of 200 elements; on a GPU to 0.3% (int8 scores) or 2% in the mean."""
    assert torch.equal(out.isnan(), ref.isnan())
    got, want = out.double().nan_to_num(), ref.double().nan_to_num()
    if GPU:
        assert relative_rms(got, want) < (0.003 if qk_format == "int8" else 0.02)
        return
    step = torch.exp2(torch.floor(torch.log2(want.abs().clamp_min(2.0**-126))) - 7)
    size = float(want.pow(2).mean().sqrt())
    assert float(((got - want).abs() > step + 1e-5 * size).double().mean()) < 0.005


def close_lse(lse: torch.Tensor, ref: torch.Tensor, qk_format: str) -> None:
    assert torch.equal(lse.isinf(), ref.isinf())
    difference = (lse - ref).nan_to_num(posinf=0, neginf=0).abs().max()
    assert float(difference) < (0.1 if GPU and qk_format != "int8" else 1e-3)


def check(b: Batch, *, causal: bool = True, window: int | None = None, **options) -> None:
    out, lse = run(b, causal=causal, window=window, device=DEVICE, **options)
    ref, ref_lse = expected(b, causal, window, torch.float16)
    close(out, ref, b.config.qk_format)
    close_lse(lse, ref_lse, b.config.qk_format)


@pytest.mark.parametrize("block", [16, 32, 64, 128, None])
def test_paged_and_packed(block):
    check(batch(RAGGED, dim=64), block=block)


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("p", ["lean", "exact"])
@pytest.mark.parametrize("qk_format", ["fp8_e4m3", "int8"])
def test_formats_and_head_dimensions(dim, p, qk_format):
    check(batch([(40, 150)], dim=dim, config=with_config(probabilities=p, qk_format=qk_format)), block=32)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 2), (5, 5)])
def test_head_groups(heads):
    check(batch([(9, 140)], *heads, dim=64), layout="kv")


@pytest.mark.parametrize("window", [0, 63, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_window(window, causal):
    check(batch([(66, 300), (30, 30)], dim=64), window=window, causal=causal)


def test_without_mask():
    check(batch(RAGGED, dim=64), causal=False, block=None)


@pytest.mark.parametrize("kind", ["peaked", "huge", "rising", "falling", "constant"])
def test_kinds_of_rows(kind):
    b = batch([(30, 400)], dim=64, kind=kind, config=with_config(qk_format="int8"))
    check(b)


def check_specification(config, kind="gaussian"):
    """One head against the formulas in fp64, without the reference."""
    b = batch([(50, 420)], 1, 1, 64, config, kind)
    out, lse = run(b, device=DEVICE)
    q, k, v = b.q[0], b.k[0], b.v[0]
    c = q.scale[:, 0].double() * k.scale.double() * SCALE / math.log(2)
    want, want_lse = specification.attend(
        q.data[:, 0].double(),
        k.data[:, 0].double(),
        dequantize_fp64(v)[:, 0],
        c,
        370,
        lean=config.probabilities == "lean",
        offset=config.offset,
        delta=config.delta,
    )
    close(out[:, 0], want, "int8")
    close_lse(lse[0], want_lse, "int8")


@pytest.mark.parametrize("p", ["lean", "exact"])
@pytest.mark.parametrize("kind", ["gaussian", "falling"])
def test_specification(p, kind):
    check_specification(with_config(qk_format="int8", probabilities=p), kind)


@pytest.mark.parametrize(("offset", "delta"), [(4, 0.0), (0, -0.344), (-2, -0.45)])
def test_offset_and_delta(offset, delta):
    check_specification(with_config(qk_format="int8", offset=float(offset), delta=delta))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", ["lean", "exact"])
@pytest.mark.parametrize("kind", ["gaussian", "peaked", "huge", "rising", "falling"])
def test_ones_give_exactly_one(kind, p, dtype):
    if dtype == torch.bfloat16 and not GPU:
        pytest.skip("the interpreter cuts fp32 to bf16 instead of rounding it")
    b = batch([(20, 300)], 1, 1, 64, with_config(probabilities=p), kind, ones=True)
    out, _ = run(b, dtype=dtype, device=DEVICE)
    assert torch.equal(out, torch.ones_like(out))


def test_codes_never_reach_beyond_the_largest():
    """A maximum that rises with every tile, and the largest offset: the codes of P stay below the NaN code."""
    b = batch([(60, 512)], 1, 1, 64, with_config(offset=8.0, delta=1.0), "rising", ones=True)
    out, lse = run(b, device=DEVICE)
    assert torch.equal(out, torch.ones_like(out)) and bool(torch.isfinite(lse).all())


def test_same_bits_chunked_batched_and_alone():
    """Rows of a sequence, whatever they are computed with; the cut is at no multiple of a tile."""
    whole = batch([(170, 300)], 2, 1, 64)
    out, lse = run(whole, device=DEVICE)
    for cut in (1, 70):
        keys = 130 + cut
        q, k, v = rows(whole.q[0], slice(0, cut)), rows(whole.k[0], slice(0, keys)), rows(whole.v[0], slice(0, keys))
        chunk, chunk_lse = run(Batch([q], [k], [v], whole.config), device=DEVICE)
        assert same_bits(chunk, out[:cut]) and same_bits(chunk_lse, lse[:, :cut].contiguous())
    rest = rows(whole.q[0], slice(99, 170))
    other = batch([(33, 77)], 2, 1, 64, seed=1)
    other_k, other_v = (
        type(x)(x.data, y.scale, x.format) for x, y in ((other.k[0], whole.k[0]), (other.v[0], whole.v[0]))
    )
    together = Batch([other.q[0], rest], [other_k, whole.k[0]], [other_v, whole.v[0]], whole.config)
    out2, lse2 = run(together, device=DEVICE)
    assert same_bits(out2[33:], out[99:]) and same_bits(lse2[:, 33:].contiguous(), lse[:, 99:].contiguous())


@pytest.mark.parametrize("block", [16, 64, 128, None])
def test_same_bits_whatever_the_pages(block):
    b = batch([(70, 200), (3, 40)], 2, 1, 64)
    out, lse = run(b, block=32, device=DEVICE)
    other, other_lse = run(b, block=block, device=DEVICE)
    assert same_bits(out, other) and same_bits(lse, other_lse)


@pytest.mark.parametrize("qk_format", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("window", [None, 20])
def test_nan_stays_with_the_rows_that_see_it(qk_format, window):
    """NaN in a key, in channels of a value and in a query; masked rows, other sequences and channels are untouched."""
    b = batch([(80, 80), (40, 40)], 2, 1, 64, with_config(qk_format=qk_format))
    clean, clean_lse = run(b, window=window, device=DEVICE)
    b.k[0].data[50, 0, 5] = -128 if qk_format == "int8" else 0x7F
    b.v[0].data[20, 0, 7] = 0xFF
    b.q[0].scale[3, 1] = torch.nan
    out, lse = run(b, window=window, device=DEVICE)
    position = torch.arange(120)
    sees = [(position >= key) & (position < 80) & (position <= key + (window or 80)) for key in (50, 20)]
    nan = torch.zeros(120, 2, 64, dtype=torch.bool)
    nan[sees[0]] = True
    nan[sees[1], :, 7] = True
    nan[3, 1] = True
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan], clean[~nan])
    rows_nan = nan[:, :, 0]
    assert torch.equal(lse.isnan(), rows_nan.T)
    assert torch.equal(lse.T[~rows_nan], clean_lse.T[~rows_nan])


def test_rows_without_a_key():
    """More queries than keys: the first have none and give 0 and -inf."""
    b = batch([(90, 90)], 2, 1, 64)
    short = Batch(b.q, [rows(b.k[0], slice(0, 60))], [rows(b.v[0], slice(0, 60))], b.config)
    out, lse = run(short, device=DEVICE)
    assert not out[:30].any() and bool((lse[:, :30] == -math.inf).all())
    tail = Batch([rows(b.q[0], slice(30, 90))], short.k, short.v, b.config)
    out_tail, lse_tail = run(tail, device=DEVICE)
    assert same_bits(out[30:], out_tail) and same_bits(lse[:, 30:].contiguous(), lse_tail)


def test_no_keys_at_all():
    b = batch([(3, 3)], 2, 1, 64)
    none = Batch(b.q, [rows(b.k[0], slice(0, 0))], [rows(b.v[0], slice(0, 0))], b.config)
    out, lse = run(none, block=None, device=DEVICE)
    assert not out.any() and bool((lse == -math.inf).all())


@pytest.mark.parametrize(
    ("empty", "block", "window", "qk_format"),
    [
        ([0], None, None, "fp8_e4m3"),
        ([0, 2, 3], None, 20, "int8"),
        ([2, 3], None, None, "int8"),
        ([1], 16, None, "fp8_e4m3"),
        ([1, 2], 128, None, "int8"),
        ([0, 3], 16, 20, "fp8_e4m3"),
    ],
)
def test_sequences_without_keys_beside_others(empty, block, window, qk_format, monkeypatch):
    """They give 0 and -inf and the others what they would, whatever the workspace held: here NaN codes.

    Hopper's kernel reads the first tile of each sequence, so that there an empty one's is zero, too.
    """
    b = batch([(5, 40), (3, 150), (7, 7), (2, 9)], 2, 2, 64, with_config(qk_format=qk_format))
    k, v = ([rows(x, slice(0, 0)) if i in empty else x for i, x in enumerate(xs)] for xs in (b.k, b.v))
    made: list[torch.Tensor] = []

    def poisoned(*shape, **options):
        made.append(torch.empty(*shape, **options))
        made[-1].view(torch.uint8).fill_(0x7F)
        return made[-1]

    want, want_lse = run(b, block=block, window=window, device=DEVICE)
    monkeypatch.setattr(prefill_call, "torch", SimpleNamespace(**{**vars(torch), "empty": poisoned}))
    out, lse = run(Batch(b.q, k, v, b.config), block=block, window=window, device=DEVICE)
    none = torch.cat([torch.full((n,), i in empty) for i, n in enumerate(b.queries)])
    assert not out[none].any() and bool((lse[:, none] == -math.inf).all())
    assert same_bits(out[~none], want[~none]) and same_bits(lse[:, ~none], want_lse[:, ~none])
    vt, bad = made[0].view(4, -1, 2, 64, 128), made[1].view(4, 2, -1)  # sequence, tile, head; sequence, head, tile
    assert not vt[empty, 0].any() and not bad[empty, :, 0].any()


def test_a_share_of_the_heads_has_the_bits_of_all():
    """Tensor parallelism: half of the query heads with their key-value heads, under the same scales."""
    b = batch([(5, 150), (3, 3)], 4, 2, 64)
    out, lse = run(b, device=DEVICE)
    for q_heads, share in shares_of_heads(b):
        half, half_lse = run(share, device=DEVICE)
        assert same_bits(half, out[:, q_heads].contiguous()) and same_bits(half_lse, lse[q_heads])


def test_fp8_output():
    b = batch([(40, 100)], 2, 1, 64)
    scale = torch.tensor([0.0005], device=DEVICE)
    out = torch.empty(40, 2, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
    got, _ = run(b, out=out, out_scale=scale, device=DEVICE)
    want, _ = run(b, device=DEVICE)
    ratio = want.float() / 0.0005
    assert float((ratio.abs() > 448).float().mean()) > 0.01  # some are saturated
    got = got.float()
    assert bool((got[ratio > 448] == 448).all()) and bool((got[ratio < -448] == -448).all())
    within = ratio.abs() < 440
    assert float((got - ratio)[within].abs().div(ratio[within].abs().clamp_min(0.02)).max()) < 0.07


def test_strided_inputs_and_outputs():
    b = batch([(33, 90)], 2, 1, 64)
    out, lse = run(b, device=DEVICE)
    wide = torch.full((33, 2, 128), torch.nan, dtype=torch.float16, device=DEVICE)
    strided, _ = run(b, out=wide[:, :, :64], device=DEVICE)
    assert same_bits(out, strided.contiguous()) and bool(wide[:, :, 64:].isnan().all())


REFUSED = [
    ({"softmax_scale": 0.0}, "softmax_scale=0.0"),
    ({"softmax_scale": None}, "softmax_scale=None .* positive"),
    ({"softmax_scale": "1"}, "softmax_scale='1' .* positive"),
    ({"window": -1}, "window=-1"),
    ({"window": [3]}, r"window=\[3\]"),
    ({"causal": "no"}, "causal='no' .* True or False"),
    ({"p": "fast"}, "p='fast'"),
    ({"qk_format": "fp4"}, "qk_format='fp4'"),
    ({"qk_format": ["int8"]}, r"qk_format=\['int8'\]"),
    ({"offset": 9}, "offset=9"),
    ({"offset": None}, "offset=None"),
    ({"delta": "0"}, "delta='0'"),
    ({"max_seqlen_q": 0}, "max_seqlen_q=0 .* at least 1"),
    ({"max_seqlen_q": -1}, "max_seqlen_q=-1 .* at least 1"),
    ({"max_seqlen_q": 3.5}, "max_seqlen_q=3.5 .* an integer"),
    ({"max_seqlen_q": None}, "max_seqlen_q=None .* an integer"),
    ({"max_seqlen_k": 0}, "max_seqlen_k=0 .* at least 1"),
    ({"max_seqlen_k": -5}, "max_seqlen_k=-5 .* at least 1"),
    ({"cu_seqlens_k": None}, "cu_seqlens_k"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q=None .* a tensor"),
    ({"cu_seqlens_q": [0, 4]}, r"cu_seqlens_q=\[0, 4\] .* a tensor"),
    ({"q": None}, "q=None .* a tensor"),
    ({"q_scale": None}, "q_scale=None .* a tensor"),
    ({"k": None}, "k_cache=None .* a tensor"),
    ({"k_scale": None}, "k_scale=None .* a tensor"),
    ({"v_scale": 1.0}, "v_scale=1.0 .* a tensor"),
    ({"out": "new"}, "out='new' .* a tensor or None"),
    ({"lse": "yes"}, "lse='yes' .* a tensor, True, False or None"),
    ({"q": lambda q: q[0]}, r"q has shape \[2, 64\]; expected \[T, Hq, D\]"),
    ({"q": lambda q: q[0, 0]}, r"q has shape \[64\]; expected \[T, Hq, D\]"),
    ({"q": lambda q: q[:, :, :32]}, "32"),
    ({"q": lambda q: q.float()}, "torch.float32"),
    ({"q_scale": lambda scale: scale[:2]}, "q_scale"),
    ({"k": lambda k: k[:, :, None]}, "k_cache"),
    ({"v": lambda v: v[0]}, r"v_cache has shape \[1, 64\]; expected \[Tk, Hkv, D\]"),
    ({"out": lambda _: torch.empty(4, 2, 64, device=DEVICE)}, "out is torch.float32"),
    ({"out": lambda _: torch.empty(4, 2, 64, dtype=torch.float8_e4m3fn, device=DEVICE)}, "out_scale is None"),
    ({"out_scale": lambda _: torch.ones(1, device=DEVICE)}, "out_scale is given"),
    ({"lse": lambda _: torch.empty(4, 2, device=DEVICE)}, r"lse is torch.float32 \[4, 2\]"),
    ({"cu_seqlens_q": lambda cu: cu.long()}, "int64"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refusals(changes, words):
    b = batch([(4, 20)], 2, 1, 64)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    keys = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
    q, k, v = (x[0].data.to(DEVICE) for x in (b.q, b.k, b.v))
    scales = (x[0].scale.to(DEVICE) for x in (b.q, b.k, b.v))
    given = dict(zip(("q", "k", "v", "q_scale", "k_scale", "v_scale"), (q, k, v, *scales), strict=True))
    given |= dict(cu_seqlens_q=cu, cu_seqlens_k=keys, max_seqlen_q=4, max_seqlen_k=20, softmax_scale=0.1)

    def call(q, k, v, q_scale, k_scale, v_scale, **options):
        return prefill(q, q_scale, k, v, k_scale, v_scale, **options)

    changed = {name: x(given.get(name)) if callable(x) else x for name, x in changes.items()}
    with pytest.raises(PrefillError, match=words):
        call(**{**given, **changed})


def test_longest_of_nothing_is_zero():
    """Without queries, or without keys in the cache, 0 is the longest; rows of no sequence are not written."""
    q, one = torch.zeros(3, 2, 64, dtype=torch.uint8, device=DEVICE), torch.ones(1, device=DEVICE)
    scale, starts = torch.ones(3, 2, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    keys = q[:, :1]

    def call(queries, keys, **longest):
        options = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, softmax_scale=0.1, **longest)
        return prefill(q[:queries], scale[:queries], keys, keys, one, one, **options)

    assert call(0, keys, max_seqlen_q=0, max_seqlen_k=0)[0].shape == (0, 2, 64)
    assert not call(3, keys[:0], max_seqlen_q=1, max_seqlen_k=0)[0].any()
    out = torch.full((3, 2, 64), 7.0, dtype=torch.bfloat16, device=DEVICE)
    call(3, keys, max_seqlen_q=1, max_seqlen_k=1, out=out)
    assert bool((out == 7).all())
