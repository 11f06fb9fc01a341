"""The rotation is orthonormal, does not change scores, and gives a token the same bits in any company."""

from __future__ import annotations

import math

import pytest
import torch

from zyfa_backend import rotation
from zyfa_backend.rotation import HEAD_DIMS, RotationError, matrix, rotate

KINDS = ("hadamard", "signed")


def walsh(size: int) -> torch.Tensor:
    """Sylvester's matrix by its other definition: the sign is the parity of the common bits of row and column."""
    return torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_matrix_is_orthonormal_with_equal_magnitudes(dim: int, kind: str) -> None:
    m = matrix(dim, kind, torch.float64)
    torch.testing.assert_close(m @ m.T, torch.eye(dim, dtype=torch.float64), atol=1e-12, rtol=0)
    for start, size in ((0, 128), (128, 64)) if dim == 192 else ((0, dim),):
        block = m[start : start + size, start : start + size]
        torch.testing.assert_close(block.abs(), torch.full_like(block, 1 / math.sqrt(size)))


def test_sylvester_sizes_and_mla_blocks() -> None:
    for dim in (64, 128):
        torch.testing.assert_close(matrix(dim, "hadamard", torch.float64), walsh(dim) / math.sqrt(dim))
    mla = torch.block_diag(walsh(128) / math.sqrt(128), walsh(64) / 8)
    torch.testing.assert_close(matrix(192, "hadamard", torch.float64), mla)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rotate_is_the_matrix_product(dim: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    for tokens in (1, 3000):  # few rows and many take different paths
        x = torch.randn(tokens, 3, dim).to(dtype)
        before = x.clone()
        y = rotate(x, kind)
        assert y.dtype == torch.float32 and y.shape == x.shape
        assert torch.equal(x, before)
        expected = x.double() @ matrix(dim, kind, torch.float64)
        torch.testing.assert_close(y.double(), expected, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_scores_do_not_change(dim: int) -> None:
    q, k = torch.randn(50, dim, dtype=torch.float64), torch.randn(60, dim, dtype=torch.float64)
    for kind in KINDS:
        scores = rotate(q, kind).double() @ rotate(k, kind).double().T
        torch.testing.assert_close(scores, q @ k.T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_bits_of_a_row_do_not_depend_on_the_others(dim: int) -> None:
    x = torch.randn(2 * rotation.CHUNK // dim + 7, dim).bfloat16()
    whole = rotate(x, "hadamard")
    for part in (slice(0, 1), slice(5, 8), slice(100, 1500), slice(len(x) - 9, len(x)), slice(len(x) - 1, len(x))):
        assert torch.equal(rotate(x[part], "hadamard"), whole[part])


def test_an_outlier_spreads() -> None:
    x = torch.zeros(1, 128)
    x[0, 77] = 100.0
    torch.testing.assert_close(rotate(x, "hadamard").abs(), torch.full((1, 128), 100 / math.sqrt(128)))


def test_nan_stays_in_its_row_and_empty_works() -> None:
    x = torch.randn(9, 2, 128)
    x[4, 1, 3] = torch.nan
    y = rotate(x, "hadamard")
    assert torch.isnan(y[4, 1]).all() and torch.isnan(y).sum() == 128
    assert rotate(torch.zeros(0, 4, 128), "signed").shape == (0, 4, 128)


def test_none_only_converts() -> None:
    x = torch.randn(4, 80).bfloat16()
    assert torch.equal(rotate(x, "none"), x.float())


def test_errors_name_what_is_accepted() -> None:
    with pytest.raises(RotationError, match="head dimension 80; accepted: 64, 96, 128, 192"):
        rotate(torch.zeros(1, 80), "hadamard")
    with pytest.raises(RotationError, match="'walsh' is not accepted; choose one of hadamard, signed, none"):
        rotate(torch.zeros(1, 64), "walsh")
    with pytest.raises(RotationError):
        matrix(80, "signed")


@pytest.mark.parametrize("kind", ["hadamard", "signed"])
@pytest.mark.parametrize("dim", [96, 128])
def test_the_matrix_is_made_on_the_cpu_whatever_the_default_device(dim, kind):
    """Engines make the GPU the default device while they load a model."""
    rotation._paley_12.cache_clear()
    with torch.device("meta"):
        made = rotation.matrix.__wrapped__(dim, kind)
    assert torch.equal(made, rotation.matrix(dim, kind))
