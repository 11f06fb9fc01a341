"""`rotate_quantize` against the reference's quantisers and against fp64, on a GPU or under Triton's interpreter.

Without a GPU these tests run where TRITON_INTERPRET=1 was set before triton was imported: see
test_rotate_quantize_interpreted.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from zyfa_backend import rotation as reference_rotation
from zyfa_backend.config import AttentionConfig
from zyfa_backend.quantization import e4m3_decode, e4m3_encode, quantize_kv, quantize_q

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from zyfa_kernels.triton import hadamard, quantize_device, rotate_quantize, rotate_quantize_kernel  # noqa: E402
from zyfa_kernels.triton.rotate_quantize import (  # noqa: E402
    ArgumentError,
    rotate_quantize_q,
    rotate_quantize_qkv,
    rotate_quantize_write,
)

DEVICE = "cuda" if GPU else "cpu"
FORMATS = ("fp8_e4m3", "int8")
ORDERED = "butterfly"  # adds in the reference's order
LARGEST = {"fp8_e4m3": 448.0, "int8": 127.0}


def gaussian(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, as heads with outliers have, on the CPU."""
    make = torch.Generator().manual_seed(seed)
    size = torch.randn(*shape[:-1], 1, generator=make).mul(2).exp()
    return (torch.randn(*shape, generator=make) * size).to(dtype)


def same_codes(got: torch.Tensor, expected: torch.Tensor, form: str) -> bool:
    """Bit for bit, but for the sign of e4m3's NaN."""
    got, expected = got.cpu().view(torch.uint8), expected.view(torch.uint8)
    if form == "int8":
        return torch.equal(got, expected)
    nan = (expected & 0x7F) == 0x7F
    return torch.equal((got & 0x7F) == 0x7F, nan) and torch.equal(got[~nan], expected[~nan])


def same_floats(got: torch.Tensor, expected: torch.Tensor) -> bool:
    got = got.cpu()
    return torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(1.0), expected.nan_to_num(1.0))


def check_q(q: torch.Tensor, rotation: str, form: str, method: str | None, **outputs) -> None:
    """q on the CPU, on the device as the strides say."""
    codes, scale = rotate_quantize_q(
        outputs.pop("on_device", q.to(DEVICE)), rotation=rotation, qk_format=form, method=method, **outputs
    )
    if rotation == "none" or method == ORDERED:
        expected = quantize_q(q.float(), AttentionConfig(rotation=rotation, qk_format=form))
        assert same_floats(scale, expected.scale)
        assert same_codes(codes, expected.data, form)
    else:
        check_within_rounding(codes, scale, rotated_fp64(q, rotation), None, form)


def rotated_fp64(x: torch.Tensor, rotation: str) -> torch.Tensor:
    return x.double() @ reference_rotation.matrix(x.shape[-1], rotation, torch.float64)


def check_within_rounding(codes, scale, y, static, form: str) -> None:
    """Each code is the nearest of a value within 2^-20 of its row's norm of y; so is the dynamic scale.

    y: fp64 [T, H, D] rotated; static: the scale given [T, H], or None for Q's.
    """
    codes, tolerance = codes.cpu(), y.norm(dim=-1, keepdim=True) * 2.0**-20
    if static is None:
        amax = y.abs().amax(-1, keepdim=True)
        expected = torch.where(amax == 0, 1.0, amax / LARGEST[form])
        static = scale.cpu().double()[..., None]
        assert torch.all((static - expected).abs() <= tolerance / LARGEST[form] + expected * 2.0**-23)
    low, high = (((y + side * tolerance) / static).clamp(-LARGEST[form], LARGEST[form]) for side in (-1, 1))
    if form == "int8":
        values, low, high = codes.view(torch.int8).double(), low.round(), high.round()
    else:
        values = e4m3_decode(codes.view(torch.uint8)).double()
        low, high = (e4m3_decode(e4m3_encode(side)).double() for side in (low, high))
    assert torch.all((values >= low) & (values <= high))
    # Not only is the code allowed: it is the exact one's but next to a tie.
    middle = (y / static).clamp(-LARGEST[form], LARGEST[form])
    middle = middle.round() if form == "int8" else e4m3_decode(e4m3_encode(middle)).double()
    assert (values != middle).double().mean() < 1e-3


@pytest.mark.parametrize("method", ["dot", ORDERED])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rotation", hadamard.ROTATIONS)
@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_q(dim, rotation, form, method):
    if method == ORDERED and dim == 96:
        with pytest.raises(ArgumentError, match="96"):
            rotate_quantize_q(gaussian(1, 1, 96).to(DEVICE), method=method)
        return
    check_q(gaussian(37, 5, dim, seed=dim), rotation, form, method)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [96, 128, 192])
def test_q_of_other_dtypes(dim, dtype):
    check_q(gaussian(33, 3, dim, dtype=dtype), "hadamard", "fp8_e4m3", "dot")
    check_q(gaussian(33, 3, dim, dtype=dtype), "none", "int8", None)
    if dim != 96:
        check_q(gaussian(33, 3, dim, dtype=dtype), "signed", "fp8_e4m3", ORDERED)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rotation", ["hadamard", "none"])
def test_rows_that_are_not_finite_or_zero(rotation, form):
    # Triton's interpreter converts subnormal bf16 wrongly.
    q = gaussian(8, 2, 192, dtype=torch.bfloat16 if GPU else torch.float32)
    q[1, 0, 5], q[2, 1, 191], q[3, 0, 0], q[4, 1, 7] = torch.nan, torch.nan, torch.inf, -torch.inf
    q[5], q[6, 0], q[6, 1] = 0.0, -0.0, 1e-38
    check_q(q, rotation, form, ORDERED)
    codes, scale = rotate_quantize_q(q.to(DEVICE), rotation=rotation, qk_format=form, method="dot")
    bad = torch.zeros(8, 2, dtype=torch.bool)
    bad[1, 0] = bad[2, 1] = bad[3, 0] = bad[4, 1] = True
    assert torch.equal(scale.cpu().isnan(), bad)  # no other row is touched
    stored = codes.cpu()[bad].view(torch.uint8)
    assert torch.all(stored == 128 if form == "int8" else (stored & 0x7F) == 0x7F)
    assert torch.all(scale.cpu()[5:7, 0] == 1) and not codes.cpu()[5].view(torch.uint8).bitwise_and(0x7F).any()


def test_the_division_rounds_correctly():
    """Markstein's correction against a true division, over many significands and 60 binades of scales."""
    rows = 1 << (16 if GPU else 8)
    make = torch.Generator().manual_seed(1)
    q = torch.randn(rows, 1, 64, generator=make) * torch.exp2(torch.rand(rows, 1, 1, generator=make) * 60 - 30)
    for form in FORMATS:
        check_q(q, "none", form, None)


@pytest.mark.parametrize("dim", [1, 40, 80, 256])
def test_any_dimension_without_a_rotation(dim):
    check_q(gaussian(9, 3, dim), "none", "fp8_e4m3", None)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 127])
def test_ragged_numbers_of_tokens(tokens):
    check_q(gaussian(tokens, 3, 128), "hadamard", "fp8_e4m3", ORDERED)


@pytest.mark.parametrize("heads", [1, 8, 40, 64, 128])
def test_any_number_of_heads(heads):
    """More than a tile's rows, as many, fewer, and none that divides or is divided."""
    tokens = 200 // heads + 2
    q = gaussian(tokens, heads, 64)
    check_q(q, "hadamard", "fp8_e4m3", ORDERED, on_device=q.transpose(0, 1).contiguous().transpose(0, 1).to(DEVICE))
    k_cache = cache("heads before slots", 14, 16, heads, 64)
    v_cache, scale = cache("K beside V", 14, 16, heads, 64), torch.linspace(0.1, 0.3, heads)
    slots = torch.arange(tokens).flip(0)
    rotate_quantize_write(
        *(x.to(DEVICE) for x in (q, q)), k_cache, v_cache, *(x.to(DEVICE) for x in (slots, scale, scale)),
        method=ORDERED,
    )  # fmt: skip
    for where, rotation in ((k_cache, "hadamard"), (v_cache, "none")):
        stored = where.cpu().flatten(0, 1)[:tokens].flip(0)
        assert same_codes(stored, quantize_kv(q, scale, "fp8_e4m3", rotation), "fp8_e4m3")


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    q = gaussian(70, 4, 128).to(DEVICE)
    codes, scale = rotate_quantize_q(q)
    for token in (0, 15, 16, 69):
        alone, alone_scale = rotate_quantize_q(q[token : token + 1])
        assert torch.equal(alone[0], codes[token]) and torch.equal(alone_scale[0], scale[token])


def test_any_stride_in_and_out():
    q = gaussian(19, 5, 128)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    check_q(q, "hadamard", "fp8_e4m3", ORDERED, on_device=turned.to(DEVICE))
    spread = torch.full((19, 7, 256), torch.nan, dtype=q.dtype, device=DEVICE)[:, 1:6, ::2]
    spread.copy_(q)
    out = torch.full((5, 128, 19), 0x55, dtype=torch.uint8, device=DEVICE).permute(2, 0, 1)
    scale = torch.empty(5, 19, device=DEVICE).T
    check_q(q, "hadamard", "fp8_e4m3", ORDERED, on_device=spread, out=out, scale=scale)
    codes, _ = rotate_quantize_q(spread, method=ORDERED, out=torch.empty_like(out).view(torch.float8_e4m3fn))
    assert codes.dtype == torch.float8_e4m3fn and torch.equal(codes.view(torch.uint8), out)


def test_addresses_beyond_two_to_the_31_elements():
    """Three tokens more than 2^31 elements apart; only the pages of the three rows are ever touched."""
    apart, q = 2**31 + 64, gaussian(3, 2, 64)
    space = torch.empty(2 * apart + 128, dtype=q.dtype, device=DEVICE)
    far = space.as_strided((3, 2, 64), (apart, 64, 1))
    far.copy_(q)
    check_q(q, "hadamard", "fp8_e4m3", ORDERED, on_device=far)
    far = space.as_strided((2, 3, 64), (64, apart, 1))  # and heads that far apart
    far.copy_(q.transpose(0, 1))
    check_q(q.transpose(0, 1), "hadamard", "fp8_e4m3", ORDERED, on_device=far)


CACHES = {
    "one after the other": lambda blocks, size, heads, dim: torch.empty(blocks, size, heads, dim, dtype=torch.uint8),
    "heads before slots": lambda blocks, size, heads, dim: torch.empty(
        blocks, heads, size, dim, dtype=torch.uint8
    ).transpose(1, 2),
    "K beside V": lambda blocks, size, heads, dim: torch.empty(blocks, 2, size, heads, dim, dtype=torch.uint8)[:, 1],
    "channels apart": lambda blocks, size, heads, dim: torch.empty(
        blocks, size, dim, heads, dtype=torch.uint8
    ).transpose(2, 3),
}


def cache(layout: str, blocks: int, size: int, heads: int, dim: int) -> torch.Tensor:
    return CACHES[layout](blocks, size, heads, dim).fill_(0x55).to(DEVICE)


@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("dim", "v_dim"), [(128, 128), (192, 128), (64, 64)])
def test_write(dim, v_dim, form, layout):
    tokens, heads, blocks, size = 45, 3, 6, 16
    k, v = gaussian(tokens, heads, dim), gaussian(tokens, heads, v_dim, seed=1)
    k[3, 1, 4], v[5, 2, 6], k[7, 0, 1], v[8, 0, 0] = torch.nan, torch.nan, torch.inf, -torch.inf
    slots = torch.randperm(blocks * size, generator=torch.Generator().manual_seed(2))[:tokens]
    slots[[0, 11, 44]] = -1
    k_scale, v_scale = torch.tensor([0.01, 0.02, 0.5]), torch.tensor([0.03])
    k_cache, v_cache = cache(layout, blocks, size, heads, dim), cache(layout, blocks, size, heads, v_dim)
    saturated = torch.tensor([5, 7], device=DEVICE)
    rotate_quantize_write(
        k.to(DEVICE), v.to(DEVICE), k_cache, v_cache, slots.to(DEVICE), k_scale.to(DEVICE), v_scale.to(DEVICE),
        rotation="hadamard", qk_format=form, saturated=saturated, method=ORDERED,
    )  # fmt: skip
    written = slots >= 0
    k_codes, k_clipped = quantize_kv(k[written], k_scale, form, "hadamard", count_saturated=True)
    v_codes, v_clipped = quantize_kv(v[written], v_scale, "fp8_e4m3", count_saturated=True)
    assert saturated.tolist() == [5 + k_clipped, 7 + v_clipped]
    assert k_clipped > 10 and v_clipped > 10  # the scales above are too small for some
    for where, codes, kind in ((k_cache, k_codes, form), (v_cache, v_codes, "fp8_e4m3")):
        expected = torch.full(where.shape, 0x55, dtype=torch.uint8).flatten(0, 1)
        expected[slots[written]] = codes.view(torch.uint8)
        assert same_codes(where.cpu().flatten(0, 1), expected, kind)  # no other slot is touched


def write_and_check(k, v, k_scale, v_scale, rotation):
    """Codes and counts against the reference, one slot for each token; the counts."""
    tokens, heads, dim = k.shape
    caches = [torch.zeros(-(-tokens // 16), 16, heads, dim, dtype=torch.uint8, device=DEVICE) for _ in "kv"]
    counts = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    rotate_quantize_write(
        k.to(DEVICE), v.to(DEVICE), *caches, torch.arange(tokens, device=DEVICE), k_scale.to(DEVICE),
        v_scale.to(DEVICE), rotation=rotation, saturated=counts, method=None if rotation == "none" else ORDERED,
    )  # fmt: skip
    found = []
    for cache_, x, scale, turn in ((caches[0], k, k_scale, rotation), (caches[1], v, v_scale, "none")):
        codes, clipped = quantize_kv(x, scale, "fp8_e4m3", turn, count_saturated=True)
        assert same_codes(cache_.flatten(0, 1)[:tokens], codes, "fp8_e4m3")
        found.append(clipped)
    assert counts.tolist() == found
    return found


plain_bits = rotate_quantize_kernel._e4m3_bits


@triton.jit
def clamping(y):
    return plain_bits(tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL))


@pytest.fixture
def saturating(monkeypatch):
    """The form for GPUs whose conversion saturates, as NVIDIA's: the interpreter's gets one that does, too."""
    if GPU:
        return
    monkeypatch.setattr(rotate_quantize_kernel, "_e4m3_bits", clamping)
    device = quantize_device.Device(3, False, True, 1 << 20)
    monkeypatch.setattr(rotate_quantize, "device_of", lambda _: device)
    monkeypatch.setattr(rotate_quantize, "_plans", {})


@pytest.mark.usefixtures("saturating")
@pytest.mark.parametrize("rotation", ["hadamard", "none"])
@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 1.0])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_values_whose_quotient_overflows_are_the_largest_code(size, scale, rotation):
    k, v = ((torch.randn(20, 2, 64, generator=torch.Generator().manual_seed(i)) * size).bfloat16() for i in (0, 1))
    k[3, 1, 4], v[5, 0, 6], k[7, 0, 1], v[8, 1, 0] = torch.nan, torch.nan, torch.inf, -torch.inf
    one = torch.tensor([scale])
    write_and_check(k, v, one, one, rotation)


@pytest.mark.usefixtures("saturating")
@pytest.mark.parametrize("clipped", [(), (0,), (2999,), (700, 701)])
def test_counts_of_few_clipped_values(clipped):
    """Far more tiles than a program has; only those that clip one count."""
    make = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3000, 3, 64, generator=make).bfloat16() for _ in range(2))
    for token in clipped:
        k[token, 1, 5], v[token, 2, 7] = 1000.0, -1000.0
    scale = torch.tensor([0.5])
    found = write_and_check(k, v, scale, scale, "none")
    assert found == [len(clipped)] * 2


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_write_on_the_matrix_unit(dim, form):
    k, v = gaussian(29, 2, dim), gaussian(29, 2, 128)
    slots = torch.arange(29, dtype=torch.int32)
    scale = torch.tensor([0.05, 0.2])
    k_cache, v_cache = cache("K beside V", 2, 32, 2, dim), cache("K beside V", 2, 32, 2, 128)
    rotate_quantize_write(
        k.to(DEVICE), v.to(DEVICE), k_cache, v_cache, slots.to(DEVICE), scale.to(DEVICE), scale.to(DEVICE),
        rotation="signed", qk_format=form, method="dot",
    )  # fmt: skip
    stored = k_cache.flatten(0, 1)[:29]
    check_within_rounding(stored, None, rotated_fp64(k, "signed"), scale[None, :, None].double(), form)
    assert same_codes(v_cache.flatten(0, 1)[:29], quantize_kv(v, scale, "fp8_e4m3"), "fp8_e4m3")


def test_fewer_slots_than_tokens():
    """Engines pad the tokens of a step; the padding has no slots."""
    k, v = gaussian(8, 1, 64).to(DEVICE), gaussian(8, 1, 64).to(DEVICE)
    k_cache, v_cache, one = cache("heads before slots", 1, 16, 1, 64), None, torch.ones(1, device=DEVICE)
    v_cache = k_cache.clone()
    rotate_quantize_write(k, v, k_cache, v_cache, torch.tensor([2, 9, 4], device=DEVICE), one, one)
    touched = (k_cache != 0x55).any(dim=(2, 3))[0].nonzero().flatten().tolist()
    assert touched == [2, 4, 9] == (v_cache != 0x55).any(dim=(2, 3))[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(("dim", "v_dim", "rotation"), [(128, 128, "hadamard"), (192, 128, "signed"), (96, 96, "none")])
def test_the_fused_form_equals_the_two(dim, v_dim, rotation):
    tokens, hq, hkv = 21, 6, 2
    width = hq * dim + hkv * (dim + v_dim)
    wide = gaussian(tokens, width + 32).to(DEVICE)
    qkv = wide[:, :width]
    q = qkv[:, : hq * dim].unflatten(1, (hq, dim))
    k = qkv[:, hq * dim : (hq + hkv) * dim].unflatten(1, (hkv, dim))
    v = qkv[:, (hq + hkv) * dim :].unflatten(1, (hkv, v_dim))
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:tokens].to(DEVICE)
    scales = torch.tensor([0.1, 0.3], device=DEVICE), torch.tensor([0.2], device=DEVICE)
    caches = [cache("K beside V", 3, 16, hkv, dim), cache("K beside V", 3, 16, hkv, v_dim)]
    twins = [x.clone() for x in caches]
    counted, counted_apart = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    codes, scale = rotate_quantize_qkv(
        qkv, hq, hkv, dim, *caches, slots, *scales, v_head_dim=v_dim, rotation=rotation, saturated=counted
    )
    apart, apart_scale = rotate_quantize_q(q, rotation=rotation)
    rotate_quantize_write(k, v, *twins, slots, *scales, rotation=rotation, saturated=counted_apart)
    assert torch.equal(codes, apart) and torch.equal(scale, apart_scale)
    assert torch.equal(caches[0], twins[0]) and torch.equal(caches[1], twins[1])
    assert torch.equal(counted, counted_apart) and counted.min() > 0


@pytest.mark.parametrize("kind", ["hadamard", "signed"])
@pytest.mark.parametrize("dim", hadamard.BLOCKS)
def test_tables_are_the_references_rotations(dim, kind):
    blocks = hadamard.matrices(dim, kind, torch.float64, torch.device("cpu"))
    scaled = [m[:order, :order] / order**0.5 for m, order in zip(blocks, hadamard.BLOCKS[dim], strict=True)]
    torch.testing.assert_close(
        torch.block_diag(*scaled), reference_rotation.matrix(dim, kind, torch.float64), rtol=0, atol=1e-15
    )


def test_bad_arguments_name_the_value_and_what_is_accepted():
    q = torch.zeros(2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    space, slots, one = cache("K beside V", 1, 16, 2, 128), torch.zeros(2, dtype=torch.int64, device=DEVICE), None
    one = torch.ones(1, device=DEVICE)

    def refuses(said: str, call, *arguments, **named):
        with pytest.raises(ArgumentError, match=said):
            call(*arguments, **named)

    refuses("rotation='walsh' .* hadamard, signed, none", rotate_quantize_q, q, rotation="walsh")
    refuses("qk_format='none' .* fp8_e4m3, int8", rotate_quantize_q, q, qk_format="none")
    refuses("method='fast' .* dot, butterfly", rotate_quantize_q, q, method="fast")
    refuses("head dimension 80; accepted: 64, 96, 128, 192", rotate_quantize_q, q[..., :80])
    refuses("float64; expected", rotate_quantize_q, q.double())
    refuses(r"q is \[2, 128\]", rotate_quantize_q, q[0])
    refuses("out is .*uint8.* torch.int8", rotate_quantize_q, q, qk_format="int8", out=space[0, :2])
    refuses(r"scale is \[2, 1\]", rotate_quantize_q, q, scale=torch.empty(2, 1, device=DEVICE))
    refuses(r"v is \[1, 2, 128\] .* same tokens", rotate_quantize_write, q, q[:1], space, space, slots, one, one)
    refuses("k_cache is .* uint8, int8 or float8_e4m3fn", rotate_quantize_write, q, q, q, q, slots, one, one)
    fnuz = space.view(torch.float8_e4m3fnuz)
    refuses("float8_e4m3fnuz", rotate_quantize_write, q, q, fnuz, fnuz, slots, one, one)
    refuses("v_cache is .* same blocks", rotate_quantize_write, q, q, space, space[:, :8], slots, one, one)
    refuses("slot_mapping is .* int32 or int64", rotate_quantize_write, q, q, space, space, slots.float(), one, one)
    refuses(r"slot_mapping is \[3\]", rotate_quantize_write, q, q, space, space, slots.new_zeros(3), one, one)
    refuses(r"v_scale is \[3\]", rotate_quantize_write, q, q, space, space, slots, one, torch.ones(3, device=DEVICE))
    refuses("k_scale is .*float64", rotate_quantize_write, q, q, space, space, slots, one.double(), one)
    refuses("saturated is", rotate_quantize_write, q, q, space, space, slots, one, one, saturated=slots[:1])
    refuses(r"qkv is \[2, 256\]; expected \[T, 768\]", rotate_quantize_qkv, q.flatten(1), 2, 2, 128, *[None] * 5)
    refuses("num_kv_heads=0", rotate_quantize_qkv, q.flatten(1), 2, 0, 128, *[None] * 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({name: None}, f"{name}=None .* a tensor") for name in ("k", "v", "k_cache", "v_cache", "slot_mapping")),
        *(({name: 1.0}, f"{name}=1.0 .* a tensor") for name in ("k_scale", "v_scale")),
        ({"saturated": [0, 0]}, r"saturated=\[0, 0\] .* a tensor or None"),
        ({"rotation": ["none"]}, r"rotation=\['none'\] .* hadamard, signed, none"),
        ({"qk_format": ["int8"]}, r"qk_format=\['int8'\] .* fp8_e4m3, int8"),
        ({"tile": 64}, "tile=64 .* a Tile or None"),
    ],
)
def test_write_refuses_what_is_no_tensor_or_choice(changes, words):
    k, one = torch.zeros(2, 2, 64, device=DEVICE), torch.ones(1, device=DEVICE)
    space = cache("K beside V", 1, 16, 2, 64)
    given = dict(k=k, v=k, k_cache=space, v_cache=space, k_scale=one, v_scale=one)
    given["slot_mapping"] = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ArgumentError, match=words):
        rotate_quantize_write(**{**given, **changes})


def test_other_forms_refuse_what_is_no_tensor_or_number():
    q = torch.zeros(2, 2, 64, device=DEVICE)
    for words, call in (
        ("q=None .* a tensor", lambda: rotate_quantize_q(None)),
        ("out='new' .* a tensor or None", lambda: rotate_quantize_q(q, out="new")),
        ("qkv=None .* a tensor", lambda: rotate_quantize_qkv(None, 1, 1, 64, *[None] * 5)),
        ("k_cache=None .* a tensor", lambda: rotate_quantize_qkv(q[:, 0].repeat(1, 3), 1, 1, 64, *[None] * 5)),
        ("head_dim=64.5 .* an integer", lambda: rotate_quantize_qkv(q[0], 1, 1, 64.5, *[None] * 5)),
        ("v_head_dim=0 .* at least 1", lambda: rotate_quantize_qkv(q[0], 1, 1, 64, *[None] * 5, v_head_dim=0)),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


def test_a_share_of_the_heads_has_the_bits_of_all():
    """Tensor parallelism: half of the heads writes half of the caches, under the same scales."""
    k, v = gaussian(19, 4, 128).to(DEVICE), gaussian(19, 4, 128, seed=1).to(DEVICE)
    slots, scale = torch.arange(19, device=DEVICE).flip(0), torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE)
    whole = [cache("one after the other", 2, 16, 4, 128) for _ in range(2)]
    rotate_quantize_write(k, v, *whole, slots, scale, scale)
    codes, q_scale = rotate_quantize_q(k)
    for heads in (slice(0, 2), slice(2, 4)):
        half = [cache("one after the other", 2, 16, 2, 128) for _ in range(2)]
        mine = scale[heads]
        rotate_quantize_write(k[:, heads].contiguous(), v[:, heads].contiguous(), *half, slots, mine, mine)
        assert all(torch.equal(x, y[:, :, heads]) for x, y in zip(half, whole, strict=True))
        half_codes, half_scale = rotate_quantize_q(k[:, heads].contiguous())
        assert torch.equal(half_codes, codes[:, heads]) and torch.equal(half_scale, q_scale[:, heads])


def test_what_changes_from_call_to_call_is_checked_each_time():
    """All else is checked once for a layout of the tensors."""
    q, one = gaussian(8, 2, 64).to(DEVICE), torch.ones(1, device=DEVICE)
    space, slots = cache("one after the other", 3, 16, 2, 64), torch.arange(8, device=DEVICE)
    out, scale = rotate_quantize_q(q)
    rotate_quantize_write(q, q, space, space, slots, one, one)
    check_q(q[:3].cpu(), "hadamard", "fp8_e4m3", None, out=out[:3], scale=scale[:3])
    with pytest.raises(ArgumentError, match=r"out is \[8, 2, 64\]"):
        rotate_quantize_q(q[:3], out=out, scale=scale[:3])
    with pytest.raises(ArgumentError, match="k and v have 8 and 7 tokens|v is"):
        rotate_quantize_write(q, q[:7], space, space, slots, one, one)
    with pytest.raises(ArgumentError, match="at most|k and v have 7 and 7 tokens, slot_mapping has 8"):
        rotate_quantize_write(q[:7], q[:7], space, space, slots, one, one)
    with pytest.raises(ArgumentError, match="v_cache is .* same blocks"):
        rotate_quantize_write(q, q, space, space[:2], slots, one, one)
    with pytest.raises(ArgumentError, match=r"k_scale is \[3\]"):
        rotate_quantize_write(q, q, space, space, slots, torch.ones(3, device=DEVICE), one)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_no_call_waits_for_the_gpu():
    q, slots = gaussian(64, 4, 128).to(DEVICE), torch.arange(64, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    caches = cache("K beside V", 4, 16, 4, 128), cache("K beside V", 4, 16, 4, 128)
    rotate_quantize_q(q)
    rotate_quantize_write(q, q, *caches, slots, one, one)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rotate_quantize_q(q)
        rotate_quantize_write(q, q, *caches, slots, one, one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
