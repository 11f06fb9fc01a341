"""The specification's rotation and FP8, from matrices and ml_dtypes: independent of what is tested."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix over sqrt(size), fp64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] times the rotation of its dimension, fp64; 192 is 128 and 64 on the diagonal."""
    x = x.double().cpu()
    if x.shape[-1] == 192:
        return torch.cat([x[..., :128] @ hadamard(128), x[..., 128:] @ hadamard(64)], -1)
    return x @ hadamard(x.shape[-1])


def encode(x: torch.Tensor) -> torch.Tensor:
    """e4m3fn bytes of x, clamped to ±448."""
    clamped = np.clip(x.double().numpy(), -448, 448)
    return torch.from_numpy(clamped.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values of e4m3fn bytes, fp64."""
    array = codes.cpu().view(torch.uint8).contiguous().numpy().view(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(array.astype(np.float64))


def quantized_query(q: torch.Tensor) -> torch.Tensor:
    """What FP8 leaves of q [T, H, D]: rotated, scaled per token and head; fp64."""
    turned = rotated(q)
    scale = turned.abs().amax(-1, keepdim=True) / 448
    return decode(encode(turned / scale)) * scale
