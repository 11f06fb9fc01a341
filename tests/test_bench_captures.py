"""The files that `zyfa bench --input` takes, and those that it refuses by name, value and what is accepted."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch

from zyfa_backend.bench.captures import read
from zyfa_backend.bench.errors import BenchError

RANDOM = np.random.default_rng(0)


def normal(*size):
    return RANDOM.normal(size=size).astype(np.float32)


def saved(path, **changed):
    """A usable file of layer 0, 4/2 heads of 128, with some of its arrays changed; None leaves one out."""
    arrays = {"q": normal(9, 4, 128), "k": normal(9, 2, 128), "v": normal(9, 2, 128), "softmax_scale": np.float32(0.25)}
    arrays |= changed
    np.savez(path, **{f"layer0.{name}": array for name, array in arrays.items() if array is not None})
    return path


def refused(path, layers=None):
    with pytest.raises(BenchError) as told:
        read(path, True, layers)
    assert str(path) in str(told.value) and "\n" not in str(told.value)
    return str(told.value)


def test_captured_operands(tmp_path):
    q, k = normal(9, 4, 128), normal(9, 2, 128)
    arrays = {f"layer{n}.{name}": x * (n + 1) for n in (0, 3) for name, x in (("q", q), ("k", k), ("v", k))}
    np.savez(tmp_path / "taken.npz", **arrays, **{"layer3.softmax_scale": np.float32(0.25)})
    both = read(tmp_path / "taken.npz", True, None)
    assert [problem.softmax_scale for problem in both] == [128**-0.5, 0.25]
    assert str(both[1].shape) == "taken layer 3 hd128 4/2 1x9 causal"
    assert torch.equal(both[1].q, torch.from_numpy(4 * q).bfloat16()) and both[0].k.shape == (9, 2, 128)
    (one,) = read(tmp_path / "taken.npz", False, [3])
    assert str(one.shape) == "taken layer 3 hd128 4/2 1x9 full"
    assert "--layers [1] are not in" in refused(tmp_path / "taken.npz", [1])
    assert refused(tmp_path / "taken.npz", [1]).endswith("it holds 0, 3")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_file_that_was_cut_off(share, tmp_path):
    whole = saved(tmp_path / "whole.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole[: int(len(whole) * share)])
    assert "is not readable as .npz" in refused(cut) and "give a file that `zyfa capture` wrote" in refused(cut)


def test_a_damaged_array(tmp_path):
    path = saved(tmp_path / "damaged.npz")
    content = bytearray(path.read_bytes())
    content[content.index(b"layer0.q.npy") + 1000] ^= 255  # within the values of q
    path.write_bytes(content)
    assert "layer0.q of" in refused(path) and "is not readable: Bad CRC-32" in refused(path)


def test_other_kinds_of_files(tmp_path):
    np.save(tmp_path / "single.npy", normal(9, 4, 128))
    assert "holds a single array, not an .npz archive" in refused(tmp_path / "single.npy")
    (tmp_path / "text.npz").write_text("not an archive")
    assert "is not readable as .npz" in refused(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", x=normal(9, 4, 128))
    assert "holds no layerN.q" in refused(tmp_path / "other.npz")
    with zipfile.ZipFile(tmp_path / "bytes.npz", "w") as archive:
        archive.writestr("layer0.q", b"no array")
    assert "layer0.q of" in refused(tmp_path / "bytes.npz") and "is not an array" in refused(tmp_path / "bytes.npz")
    array = io.BytesIO()
    np.save(array, np.array([None]), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "objects.npz", "w") as archive:
        archive.writestr("layer0.q.npy", array.getvalue())
    assert "layer0.q of" in refused(tmp_path / "objects.npz")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": None}, "holds no layer0.k; give a file that"),
        ({"q": np.float32(1)}, "layer0.q of|is [] float32; expected numbers [tokens, heads, D]"),
        ({"v": normal(9, 256)}, "layer0.v of|is [9, 256] float32; expected numbers"),
        ({"k": normal(9, 2, 128).astype(complex)}, "layer0.k of|is [9, 2, 128] complex128; expected numbers"),
        ({"k": normal(9, 2, 128).astype("U8")}, "layer0.k of|is [9, 2, 128] <U8; expected numbers"),
        ({"k": normal(9, 2, 64)}, "k [9, 2, 64]|with D/Dv of 64/64, 128/128, 192/128"),
        ({"k": normal(9, 4, 128)}, "k [9, 4, 128], v [9, 2, 128]; expected q [T, Hq, D], k [T, Hkv, D]"),
        ({"q": normal(8, 4, 128)}, "q [8, 4, 128], k [9, 2, 128]|expected"),
        ({name: normal(9, 2, 80) for name in "qkv"}, "q [9, 2, 80]|with D/Dv of"),
        ({"q": normal(9, 3, 128)}, "layer 0 of|has 3/2 heads; query heads are a multiple of the KV heads, 1 to 1024"),
        ({name: normal(9, 0, 128) for name in "kv"}, "has 4/0 heads; query heads"),
        ({"q": normal(9, 1026, 128)}, "has 1026/2 heads; query heads"),
        ({name: normal(0, 2, 128) for name in "qkv"}, "has 0 tokens; 1 to 1048576 are accepted"),
        ({"q": np.full((9, 4, 128), np.nan)}, "layer0.q of|has 4608 values that are NaN or infinite in bf16"),
        ({"k": np.full((9, 2, 128), 1e39)}, "layer0.k of|has 2304 values that are NaN or infinite in bf16"),
        ({"v": np.zeros((9, 2, 128))}, "layer0.v of|is zero throughout"),
        ({"softmax_scale": np.float32("nan")}, "layer0.softmax_scale of|is nan; expected a positive number"),
        ({"softmax_scale": np.float32(0)}, "is 0; expected a positive number that is finite in fp32"),
        ({"softmax_scale": np.float32(-0.25)}, "is -0.25; expected a positive number"),
        ({"softmax_scale": np.float32("inf")}, "is inf; expected a positive number"),
        ({"softmax_scale": np.float64(1e300)}, "is 1e+300; expected a positive number that is finite in fp32"),
        ({"softmax_scale": normal(2)}, "layer0.softmax_scale of|is [2] float32; expected one number"),
        ({"softmax_scale": np.array("0.25")}, "is [] <U4; expected one number"),
    ],
)
def test_operands_that_are_not_usable(changed, said, tmp_path):
    told = refused(saved(tmp_path / "odd.npz", **changed))
    assert all(part in told for part in said.split("|")), told


def test_the_file_that_the_refused_ones_vary_is_usable(tmp_path):
    (problem,) = read(saved(tmp_path / "good.npz"), True, None)
    assert problem.softmax_scale == 0.25 and problem.shape.kv_heads == 2
