"""Inputs for the attention tests, and operands made of them."""

from __future__ import annotations

import torch

from zyfa_backend.config import AttentionConfig
from zyfa_backend.quantization import Quantized, calibrate_scale, quantize_kv, quantize_q

KINDS = ("gaussian", "peaked", "constant", "huge", "rising", "falling")
LENGTHS = (1, 63, 64, 65, 127, 1000)


def inputs(
    tokens: int,
    q_heads: int = 2,
    kv_heads: int = 1,
    dim: int = 128,
    v_dim: int | None = None,
    kind: str = "gaussian",
    seed: int = 0,
    queries: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [queries or tokens, q_heads, dim], k, v [tokens, kv_heads, …] in bf16.

    peaked: a few keys take nearly all the weight. huge: scores in the thousands. constant: all keys alike.
    rising: the row maximum grows with every block of 64 keys. falling: each block lies below the one before.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(queries if queries is not None else tokens, q_heads, dim)
    k, v = normal(tokens, kv_heads, dim), normal(tokens, kv_heads, v_dim or dim)
    if kind == "peaked":
        q, k = q + 3, k + torch.where(torch.rand(tokens, 1, 1, generator=generator) < 0.02, 3.0, 0.0)
    elif kind == "constant":
        q, k = torch.ones_like(q), torch.ones_like(k)
    elif kind == "huge":
        q, k = q * 40, k * 40
    elif kind in ("rising", "falling"):
        q = q.abs() + 0.5
        step = torch.arange(tokens)[:, None, None] // 64 * (0.1 if kind == "rising" else -0.1)
        k = 0.1 * k + step
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: AttentionConfig
) -> tuple[Quantized, Quantized, Quantized]:
    """Quantised as config says, with a scale per head that is nowhere 1."""
    stored = []
    for x, form, rotation in ((k, config.qk_format, config.rotation), (v, config.v_format, "none")):
        scale = torch.tensor(1.0) if form == "none" else calibrate_scale(x, 1.03, format=form, rotation=rotation)
        stored.append(Quantized(quantize_kv(x, scale, form, rotation), scale, form))
    return quantize_q(q, config), stored[0], stored[1]


def rows(x: Quantized, part: slice) -> Quantized:
    """Some tokens of an operand; a scale per token goes with them."""
    return Quantized(x.data[part], x.scale[part] if x.scale.dim() == 2 else x.scale, x.format)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN included."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
