"""`decode` against the reference, the specification and `prefill`, on a GPU or under Triton's interpreter.

Without a GPU these tests run where TRITON_INTERPRET=1 was set before triton was imported: see
test_decode_interpreted.py. Products of codes are exact here on any device, so that only the order of sums differs.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from tests.attention_cases import rows, same_bits
from zyfa_backend.oracle import dequantize_fp64, relative_rms

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from zyfa_kernels.triton import decode_call  # noqa: E402
from zyfa_kernels.triton.decode import PrefillError, decode  # noqa: E402

from tests.triton import specification  # noqa: E402
from tests.triton.decoding import last_tokens, run_decode  # noqa: E402
from tests.triton.problems import SCALE, Batch, expected, run, shares_of_heads, with_config  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
RAGGED = [1, 130, 520]
INT8 = with_config(qk_format="int8")


@pytest.fixture(autouse=True)
def prepared_anew(monkeypatch):
    """Constants that a test changes must not meet a call that was prepared before."""
    from zyfa_kernels.triton import decode as module

    monkeypatch.setattr(module, "_prepared", {})


def close(out: torch.Tensor, ref: torch.Tensor) -> None:
    """Equal up to a step of bf16 in all but 1 of 200 elements, NaN at the same places."""
    assert torch.equal(out.isnan(), ref.isnan())
    got, want = out.double().nan_to_num(), ref.double().nan_to_num()
    step = torch.exp2(torch.floor(torch.log2(want.abs().clamp_min(2.0**-126))) - 7)
    size = float(want.pow(2).mean().sqrt())
    assert float(((got - want).abs() > step + 1e-5 * size).double().mean()) < 0.005


def close_lse(lse: torch.Tensor, ref: torch.Tensor) -> None:
    assert torch.equal(lse.isinf(), ref.isinf()) and torch.equal(lse.isnan(), ref.isnan())
    assert float((lse - ref).nan_to_num(posinf=0, neginf=0).abs().max()) < 1e-3


def check(b: Batch, window: int | None = None, **options) -> None:
    out, lse = run_decode(b, window=window, device=DEVICE, **options)
    ref, ref_lse = expected(b, True, window, torch.float16)
    close(out, ref)
    close_lse(lse, ref_lse)


@pytest.mark.parametrize("block", [1, 16, 32, 64, 128, 256])
def test_block_sizes(block):
    check(last_tokens(RAGGED, dim=64), block=block)


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("p", ["lean", "exact"])
@pytest.mark.parametrize("qk_format", ["fp8_e4m3", "int8"])
def test_formats_and_head_dimensions(dim, p, qk_format):
    check(last_tokens([270], dim=dim, config=with_config(probabilities=p, qk_format=qk_format)), block=32)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (14, 2), (3, 3), (68, 1)])
def test_head_groups(heads):
    check(last_tokens([280], *heads, dim=64), layout="kv")


@pytest.mark.parametrize("window", [0, 63, 128, 300])
def test_window(window):
    check(last_tokens([700, 30], dim=64), window=window, block=64)


@pytest.mark.parametrize("kind", ["peaked", "huge", "rising", "falling", "constant"])
def test_kinds_of_rows(kind):
    check(last_tokens([600], dim=64, kind=kind, config=INT8))


@pytest.mark.parametrize("p", ["lean", "exact"])
@pytest.mark.parametrize("kind", ["gaussian", "falling"])
def test_specification(p, kind):
    """One head against the formulas in fp64, without the reference."""
    config = with_config(qk_format="int8", probabilities=p)
    b = last_tokens([820], 1, 1, 64, config, kind)
    out, lse = run_decode(b, device=DEVICE)
    q, k, v = b.q[0], b.k[0], b.v[0]
    c = q.scale[:, 0].double() * k.scale.double() * SCALE / math.log(2)
    want, want_lse = specification.attend(
        q.data[:, 0].double(), k.data[:, 0].double(), dequantize_fp64(v)[:, 0], c, 819,
        lean=p == "lean", offset=config.offset, delta=config.delta,
    )  # fmt: skip
    close(out[:, 0], want)
    close_lse(lse[0], want_lse)


@pytest.mark.parametrize(
    ("kind", "p", "most"), [("gaussian", "lean", 2), ("falling", "lean", 32), ("falling", "exact", 2)]
)
def test_codes_of_prefill(kind, p, most, monkeypatch):
    """int8 scores are exact, so every code of P is prefill's: the results differ by the order of fp32 sums alone.

    Splits that begin from a maximum of their own have other codes, which moves the results of the three by 2.3%, 0.14%
    and 0.044%. On a GPU two bounds are wider, for prefill's FP8 products keep 14 bits on Hopper: there the results
    differ by 0.02–0.03%, and LSE by 1.3e-5 at most.
    """
    monkeypatch.setattr(decode_call, "most_splits", lambda heads: most)
    b = last_tokens([640], 1, 1, 64, with_config(qk_format="int8", probabilities=p), kind)
    out, lse = run_decode(b, device=DEVICE)
    want, want_lse = run(b, block=128, device=DEVICE)
    assert float((out.double() - want.double()).abs().max()) <= 2**-10 * float(want.abs().max())
    if GPU:
        assert relative_rms(out.double(), want.double()) < 4e-4
    else:
        assert float((out == want).float().mean()) > 0.97
    assert float((lse - want_lse).abs().max()) < (5e-5 if GPU else 1e-5)


@pytest.mark.parametrize(
    ("kind", "p"),
    [
        ("gaussian", "exact"),
        ("peaked", "lean"),
        ("huge", "lean"),
        ("huge", "exact"),
        ("rising", "lean"),
        ("falling", "lean"),
    ],
)
def test_ones_give_exactly_one(kind, p):
    b = last_tokens([600], 2, 1, 64, with_config(probabilities=p), kind, ones=True)
    out, _ = run_decode(b, device=DEVICE)
    assert torch.equal(out, torch.ones_like(out))


def test_codes_never_reach_beyond_the_largest():
    """A maximum that rises with every tile, and the largest offset: the codes of P stay below the NaN code."""
    b = last_tokens([512], 1, 1, 64, with_config(offset=8.0, delta=1.0), "rising", ones=True)
    out, lse = run_decode(b, device=DEVICE)
    assert torch.equal(out, torch.ones_like(out)) and bool(torch.isfinite(lse).all())


def test_same_bits_whatever_the_batch_the_pages_and_the_launch(monkeypatch):
    """Alone or batched, any page size, a larger max_seqlen_k, one program for all splits, a batch taken in parts."""
    b = last_tokens([520, 40], 2, 1, 64)
    out, lse = run_decode(b, block=32, device=DEVICE)
    for i in range(2):
        alone = Batch([b.q[i]], [b.k[i]], [b.v[i]], b.config)
        one, one_lse = run_decode(alone, block=1, device=DEVICE)
        assert same_bits(one, out[i : i + 1]) and same_bits(one_lse, lse[:, i : i + 1])
    for name, value, options in (
        ("PROGRAMS", 1, {}),
        ("WORKSPACE_BYTES", 1, {}),
        ("PROGRAMS", 1024, {"block": 256, "max_seqlen_k": 700}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(decode_call, name, value)
            other, other_lse = run_decode(b, device=DEVICE, **{"block": 32, **options})
        assert same_bits(out, other) and same_bits(lse, other_lse)


@pytest.mark.parametrize("qk_format", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("window", [None, 90])
def test_nan_stays_with_the_rows_that_see_it(qk_format, window):
    """NaN in a key, in a channel of a value and in a query; out of the window, or in another row, it does nothing."""
    b = last_tokens([300, 40, 20, 290], 2, 1, 64, with_config(qk_format=qk_format))
    clean, clean_lse = run_decode(b, window=window, device=DEVICE)
    b.k[0].data[50, 0, 5] = -128 if qk_format == "int8" else 0x7F
    b.v[1].data[20, 0, 7] = 0xFF
    b.q[2].scale[0, 1] = torch.nan
    b.v[3].data[100, 0, 9] = 0x7F
    out, lse = run_decode(b, window=window, device=DEVICE)
    nan = torch.zeros(4, 2, 64, dtype=torch.bool)
    nan[0] = window is None
    nan[1, :, 7] = True
    nan[2, 1] = True
    nan[3, :, 9] = window is None
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan], clean[~nan])
    rows_nan = nan[:, :, 0]
    assert torch.equal(lse.isnan(), rows_nan.T)
    assert torch.equal(lse.T[~rows_nan], clean_lse.T[~rows_nan])


def test_rows_without_a_key_and_keys_beyond_the_maximum():
    """Rows that pad a captured batch have length 0; a length beyond max_seqlen_k is cut."""
    b = last_tokens([300, 300, 300], 2, 1, 64)
    out, lse = run_decode(b, lengths=[0, 300, 0], window=50, device=DEVICE)
    want, want_lse = run_decode(b, window=50, device=DEVICE)
    assert same_bits(out[1], want[1]) and same_bits(lse[:, 1], want_lse[:, 1])
    assert not out[::2].any() and bool((lse[:, ::2] == -math.inf).all())
    cut, _ = run_decode(b, lengths=[1000] * 3, max_seqlen_k=300, device=DEVICE)
    assert same_bits(cut, run_decode(b, device=DEVICE)[0])
    none, none_lse = run_decode(b, lengths=[0] * 3, device=DEVICE)
    assert not none.any() and bool((none_lse == -math.inf).all())


def test_strided_output():
    b = last_tokens([90, 20], 2, 1, 64)
    out, _ = run_decode(b, device=DEVICE)
    wide = torch.full((2, 2, 128), torch.nan, dtype=torch.float16, device=DEVICE)
    strided, _ = run_decode(b, out=wide[:, :, :64], device=DEVICE)
    assert same_bits(out, strided) and bool(wide[:, :, 64:].isnan().all())


REFUSED = [
    ({"softmax_scale": 0.0}, "softmax_scale=0.0"),
    ({"softmax_scale": None}, "softmax_scale=None"),
    ({"window": -1}, "window=-1"),
    ({"window": [3]}, r"window=\[3\]"),
    ({"p": "fast"}, "p='fast'"),
    ({"qk_format": "fp4"}, "qk_format='fp4'"),
    ({"offset": 9}, "offset=9"),
    ({"offset": "8"}, "offset='8'"),
    ({"max_seqlen_k": 33}, "max_seqlen_k=33 is more than the 32"),
    ({"max_seqlen_k": -1}, "max_seqlen_k=-1 .* at least 0"),
    ({"max_seqlen_k": 2.5}, "max_seqlen_k=2.5 .* an integer"),
    ({"max_seqlen_k": None}, "max_seqlen_k=None .* an integer"),
    ({"q": None}, "q_codes=None .* a tensor"),
    ({"q_scale": None}, "q_scale=None .* a tensor"),
    ({"v_scale": None}, "v_scale=None .* a tensor"),
    ({"seqlens_k": None}, "seqlens_k=None .* a tensor"),
    ({"block_table": [[0, 1]]}, r"block_table=\[\[0, 1\]\] .* a tensor"),
    ({"out": "new"}, "out='new' .* a tensor or None"),
    ({"q": lambda q: q[0]}, r"q has shape \[2, 64\]"),
    ({"q": lambda q: q[0, 0]}, r"q has shape \[64\]"),
    ({"q": lambda q: q[:, :, :32]}, "32"),
    ({"q": lambda q: q.float()}, "torch.float32"),
    ({"q_scale": lambda scale: scale[:0]}, "q_scale"),
    ({"v": lambda v: v[0]}, r"v_cache has shape \[16, 1, 64\]"),
    ({name: lambda x: x.view(8, 8, 1, 64) for name in "kv"}, "blocks of 8 tokens; accepted: 1, 16, 32"),
    ({"seqlens_k": lambda x: x.long()}, "int64"),
    ({"seqlens_k": lambda x: x.repeat(2)}, "seqlens_k has 2 rows"),
    ({"block_table": lambda x: x[0]}, "block_table"),
    ({"out_dtype": torch.float32}, "out_dtype=torch.float32"),
    ({"out": lambda _: torch.empty(1, 2, 32, dtype=torch.bfloat16, device=DEVICE)}, "out is torch.bfloat16"),
    (
        {"out": lambda _: torch.empty(1, 2, 64, dtype=torch.float8_e4m3fn, device=DEVICE)},
        "out is torch.float8_e4m3fn .* expected torch.bfloat16 or torch.float16",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refusals(changes, words):
    b = last_tokens([20], 2, 1, 64)
    cache = torch.zeros(4, 16, 1, 64, dtype=torch.uint8, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    given = dict(
        q=b.q[0].data.to(DEVICE), q_scale=b.q[0].scale.to(DEVICE), k=cache, v=cache, k_scale=one, v_scale=one,
        seqlens_k=torch.tensor([20], dtype=torch.int32, device=DEVICE),
        block_table=torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE), max_seqlen_k=20, softmax_scale=0.1,
    )  # fmt: skip

    def call(q, q_scale, k, v, k_scale, v_scale, **options):
        return decode(q, q_scale, k, v, k_scale, v_scale, **options)

    changed = {name: x(given.get(name)) if callable(x) else x for name, x in changes.items()}
    with pytest.raises(PrefillError, match=words):
        call(**{**given, **changed})


def test_a_share_of_the_heads_has_the_bits_of_all():
    """Tensor parallelism: half of the query heads with their key-value heads, under the same scales."""
    b = last_tokens([300, 3], 4, 2, 64)
    out, lse = run_decode(b, device=DEVICE)
    for q_heads, share in shares_of_heads(b):
        half, half_lse = run_decode(share, device=DEVICE)
        assert same_bits(half, out[:, q_heads].contiguous()) and same_bits(half_lse, lse[q_heads])


def test_key_value_heads_do_not_decide_about_splits_up_to_8192_keys():
    """The least that a sequence is cut into, whatever the heads of a GPU: all its splits have the fewest tiles."""
    fewest = min(decode_call.most_splits(heads) for heads in range(1, 257))
    assert fewest * decode_call.LEAST_TILES * decode_call.TILE == 8192


def test_a_batch_of_none():
    b = last_tokens([20], 2, 1, 64)
    none = rows(b.q[0], slice(0, 0))
    out, lse = decode(
        none.data.to(DEVICE), none.scale.to(DEVICE), *[torch.zeros(1, 16, 1, 64, dtype=torch.uint8, device=DEVICE)] * 2,
        *[torch.ones(1, device=DEVICE)] * 2, seqlens_k=torch.zeros(0, dtype=torch.int32, device=DEVICE),
        block_table=torch.zeros(0, 4, dtype=torch.int32, device=DEVICE), max_seqlen_k=64, softmax_scale=0.1,
    )  # fmt: skip
    assert out.shape == (0, 2, 64) and lse.shape == (2, 0)
