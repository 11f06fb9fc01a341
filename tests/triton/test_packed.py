"""K and V that go to no cache: their scales against fp64, their codes against those that a cache gets.

Without a GPU these tests run where TRITON_INTERPRET=1 was set before triton was imported: see
test_decode_interpreted.py.
"""

from __future__ import annotations

import os
import re

import pytest
import torch

from zyfa_backend import rotation as reference_rotation

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from zyfa_kernels.triton import head_scales as module  # noqa: E402
from zyfa_kernels.triton import quantize_device, rotate_quantize  # noqa: E402
from zyfa_kernels.triton.head_scales import head_scales  # noqa: E402
from zyfa_kernels.triton.rotate_quantize import (  # noqa: E402
    ArgumentError,
    rotate_quantize_packed,
    rotate_quantize_q,
    rotate_quantize_write,
)

DEVICE = "cuda" if GPU else "cpu"
FORMATS = ("fp8_e4m3", "int8")
# Triton's interpreter converts subnormal bf16 wrongly.
DTYPE = torch.bfloat16 if GPU else torch.float32


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, 5])
def processors(request, monkeypatch) -> None:
    """Several programs for a head, also where the interpreter stands for a small device."""
    if GPU:
        return
    device = quantize_device.Device(request.param, False, False, 1 << 20)
    monkeypatch.setattr(module, "device_of", lambda _: device)
    monkeypatch.setattr(module, "_prepared", {})


def largest_fp64(x: torch.Tensor, rotation: str) -> torch.Tensor:
    """The largest magnitude of each head, of the tokens that are finite; 0 without any. x: [T, H, D] on the CPU."""
    finite = x.isfinite().all(-1)
    x = torch.where(finite[..., None], x, 0).double()
    if rotation != "none":
        x = x @ reference_rotation.matrix(x.shape[-1], rotation, torch.float64)
    return x.abs().amax((0, 2))


def check(scale: torch.Tensor, largest: torch.Tensor, form: str) -> None:
    """Of int8 the largest over 127; else the power of two for which the largest is in (224, 448], but for rounding."""
    scale = scale.cpu().double()
    assert torch.all(scale[largest == 0] == 1)
    scale, largest = scale[largest > 0], largest[largest > 0]
    if form == "int8":
        assert torch.all((scale * 127 / largest - 1).abs() < 2.0**-18)
        return
    significand, _ = torch.frexp(scale)
    assert torch.all(significand == 0.5)
    held = largest / scale
    tiny = scale == 2.0**-126
    assert torch.all(held <= 448 * (1 + 2.0**-18)) and torch.all((held > 224 * (1 - 2.0**-18)) | tiny)


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rotation", ["hadamard", "signed", "none"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (64, 1), (150, 3), (700, 2)])
def test_scales(tokens, heads, rotation, form):
    size = torch.tensor([3.0**i for i in range(heads)])[:, None]
    k, v = (gaussian(tokens, heads, d, seed=d, dtype=DTYPE) * size.to(DTYPE) for d in (192, 128))
    k[tokens // 2, 0, 150] = 700.0  # in the second block of the diagonal, in one of a head's programs
    v[-1, -1, 127] = -5e4
    k_scale, v_scale = head_scales(k.to(DEVICE), v.to(DEVICE), rotation=rotation, qk_format=form)
    check(k_scale, largest_fp64(k, rotation), form)
    check(v_scale, largest_fp64(v, "none"), "fp8_e4m3")


@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (96, 40), (128, 256)])
def test_scales_of_other_dimensions(dim, v_dim):
    k, v = gaussian(70, 2, dim), gaussian(70, 2, v_dim)
    k_scale, v_scale = head_scales(k.to(DEVICE), v.to(DEVICE))
    check(k_scale, largest_fp64(k, "hadamard"), "fp8_e4m3")
    check(v_scale, largest_fp64(v, "none"), "fp8_e4m3")


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rotation", ["hadamard", "none"])
def test_tokens_that_are_not_finite_do_not_count(rotation, form):
    k, v = (gaussian(80, 3, d, seed=d, dtype=DTYPE) for d in (192, 128))
    k[3] *= 100
    k[3, 0, 0], k[3, 1, 191], k[3, 2, 128] = torch.nan, torch.inf, -torch.inf
    v[79] *= 100
    v[79, 0, 127], v[79, 1, 0], v[79, 2, 64] = torch.nan, torch.inf, -torch.inf
    k_scale, v_scale = head_scales(k.to(DEVICE), v.to(DEVICE), rotation=rotation, qk_format=form)
    check(k_scale, largest_fp64(k, rotation), form)
    check(v_scale, largest_fp64(v, "none"), "fp8_e4m3")
    assert largest_fp64(k, rotation).max() < 10


@pytest.mark.parametrize("form", FORMATS)
def test_without_anything_that_counts_the_scale_is_one(form):
    k, v = (torch.zeros(5, 2, d, dtype=DTYPE, device=DEVICE) for d in (192, 128))
    k[:, 1], v[:, 1] = -0.0, torch.nan
    for keys in (5, 0):
        scales = head_scales(k[:keys], v[:keys], qk_format=form)
        assert all(torch.equal(s.cpu(), torch.ones(2)) for s in scales)


@pytest.mark.parametrize("power", [-126, -100, -3, 0, 20, 118])
def test_powers_of_two_are_exact_at_their_ends(power):
    """448 · 2^n has the scale 2^n, the next number above 2^(n + 1); what would be below 2^-126 has 2^-126."""
    end = torch.tensor(448.0 * 2.0**power)
    above = torch.nextafter(end, torch.tensor(torch.inf))
    v = torch.zeros(3, 3, 128)
    v[1, 0, 5], v[2, 1, 77], v[0, 2, 127] = end, -above, end / 2
    _, scale = head_scales(torch.zeros(3, 3, 192, device=DEVICE), v.to(DEVICE))
    expected = [2.0**power, 2.0 ** (power + 1), max(2.0 ** (power - 1), 2.0**-126)]
    assert scale.cpu().double().tolist() == expected


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("q_tokens", "tokens", "heads"), [(70, 70, 2), (3, 130, 16), (33, 1, 5), (4, 0, 2)])
def test_codes_are_those_of_a_cache(q_tokens, tokens, heads, form):
    q, k = gaussian(q_tokens, heads, 192, seed=1).to(DEVICE), gaussian(tokens, heads, 192).to(DEVICE)
    fused = gaussian(tokens, heads, 256, seed=2).to(DEVICE)
    v = fused[..., 128:]
    scales = [torch.linspace(0.001, 0.05, heads, device=DEVICE) for _ in range(2)]
    got = rotate_quantize_packed(q, k, v, *scales, qk_format=form)
    codes, scale = rotate_quantize_q(q, qk_format=form)
    caches = [torch.zeros(tokens // 16 + 1, 16, heads, d, dtype=torch.uint8, device=DEVICE) for d in (192, 128)]
    rotate_quantize_write(k, v, *caches, torch.arange(tokens, device=DEVICE), *scales, qk_format=form)
    assert torch.equal(got[0], codes) and torch.equal(got[1], scale)
    assert got[2].dtype == codes.dtype and got[3].dtype == torch.uint8
    for packed, cache in zip(got[2:], caches, strict=True):
        assert torch.equal(packed.view(torch.uint8), cache.flatten(0, 1)[:tokens])
    if tokens > 1:
        assert all((x.view(torch.uint8) != 0).any() for x in got)


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_clipped_with_the_scales_of_the_values(form):
    k, v = gaussian(200, 2, 192).to(DEVICE), gaussian(200, 2, 128, seed=5).to(DEVICE)
    caches = [torch.zeros(13, 16, 2, d, dtype=torch.uint8, device=DEVICE) for d in (192, 128)]
    counts, slots = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.arange(200, device=DEVICE)
    scales = head_scales(k, v, qk_format=form)
    rotate_quantize_write(k, v, *caches, slots, *scales, qk_format=form, saturated=counts)
    assert counts.tolist() == [0, 0]
    rotate_quantize_write(k, v, *caches, slots, *(s / 4 for s in scales), qk_format=form, saturated=counts)
    assert all(n > 0 for n in counts.tolist())


def test_other_numbers_of_tokens_compile_nothing_anew(monkeypatch):
    monkeypatch.setattr(rotate_quantize, "_plans", {})
    monkeypatch.setattr(module, "_prepared", {})
    for tokens in (3, 64, 129):
        q, k, fused = (gaussian(tokens, 2, d).to(DEVICE) for d in (192, 192, 256))
        v = fused[..., :128]
        rotate_quantize_packed(q, k, v, *head_scales(k, v))
    assert len(rotate_quantize._plans) == len(module._prepared) == 1
    if GPU:
        assert len(next(iter(rotate_quantize._plans.values())).compiled) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_nothing_waits_for_the_device():
    q, k, v = (gaussian(300, 4, d).to(DEVICE) for d in (192, 192, 128))

    def run() -> None:
        rotate_quantize_packed(q, k, v, *head_scales(k, v))

    run()  # compiles, makes tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_arguments_are_refused_by_name():
    k, v = torch.zeros(4, 2, 192, device=DEVICE), torch.zeros(4, 2, 128, device=DEVICE)
    q, one = torch.zeros(4, 2, 192, device=DEVICE), torch.ones(2, device=DEVICE)
    cases = [
        ("k=None .* a tensor", lambda: head_scales(None, v)),
        (r"v is \[4, 2\]", lambda: head_scales(k, v[..., 0])),
        (r"v is \[3, 2, 128\].*expected \[4, 2, 128\]", lambda: head_scales(k, v[:3])),
        (r"v is .*float16.*expected .*float32", lambda: head_scales(k, v.half())),
        ("rotation='walsh' .* hadamard, signed, none", lambda: head_scales(k, v, rotation="walsh")),
        ("head dimension 80", lambda: head_scales(k[..., :80], v)),
        ("qk_format='fp4' .* fp8_e4m3, int8", lambda: head_scales(k, v, qk_format="fp4")),
        (r"k is \[4, 2, 128\].*expected \[4, 2, 192\]", lambda: rotate_quantize_packed(q, k[..., :128], v, one, one)),
        (r"v is \[3, 2, 128\]", lambda: rotate_quantize_packed(q, k, v[:3], one, one)),
        (r"k is .*float16", lambda: rotate_quantize_packed(q, k.half(), v.half(), one, one)),
        (r"k_scale is \[3\].*expected \[2\]", lambda: rotate_quantize_packed(q, k, v, torch.ones(3), one)),
        ("v_scale=2.0 .* a tensor", lambda: rotate_quantize_packed(q, k, v, one, 2.0)),
        ("qk_format='fp4'", lambda: rotate_quantize_packed(q, k, v, one, one, qk_format="fp4")),
    ]
    for pattern, call in cases:
        with pytest.raises(ArgumentError) as caught:
            call()
        assert re.search(pattern, str(caught.value)), f"{pattern}: {caught.value}"
