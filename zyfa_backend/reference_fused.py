"""P of one panel as the GPU kernels form it: one fused multiply-add per score instead of separate steps.

The formulas are those of `reference_tiles.block_probabilities`, but a score that lies next to a rounding tie of P may
get the neighbouring code when the fp32 operations before it round differently. With `arithmetic="fused"` the reference
rounds where the kernels do, so that what still differs is not a matter of ties:

    s = q·k, rounded to fp32 after each 64 dimensions, m in the same units, slope = 8c (lean) or c (exact),
    -k  = max(ceil(c · (max_j s_j - m')), -100)
    lean:  code = clamp(round(fma(s, 8c, fma(-8c, m', 8B + 56 + delta) + 8k)), 0, 126)
    exact: y - B = fma(s, c, k - c · m'),  P = e4m3(256 · 2^(y-B))
"""

from __future__ import annotations

import torch

from zyfa_backend.config import BLOCK, AttentionConfig
from zyfa_backend.reference_tiles import _finite, _running_maximum, round_to_e4m3

SMALLEST_SCALE = 1e-30  # of c: keeps -inf · c at -inf
_LARGEST_EXPONENT = 100.0


def fused_probabilities(
    s: torch.Tensor, m: torch.Tensor, c: torch.Tensor, config: AttentionConfig, scratch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """P of one panel, in place.

    s: [..., n] fp32, products q·k, -inf where masked, n a multiple of config.tile; overwritten by P.
    m: [...] running maximum of s before the panel, -inf at the start; c: [...] log2 units of one unit of s.
    scratch: fp32, at least as many elements as s, overwritten.
    Returns (P as [..., n/64, 64], factor [..., n/64], m' [...], alpha [...]), as block_probabilities does; alpha is
    2^(c · (m - m')).
    """
    blocks = s.view(*s.shape[:-1], -1, BLOCK)
    top = blocks.amax(-1)
    running = _running_maximum(top, m, config.tile)
    origin = _finite(running)
    scale = c.unsqueeze(-1)
    minus_k = torch.ceil(scale * (top - origin)).clamp_min_(-_LARGEST_EXPONENT)
    m_after = running[..., -1]
    factor = torch.exp2(scale * (running - origin[..., -1:])).mul_(torch.exp2(minus_k - config.offset))
    alpha = torch.exp2(c * (m - _finite(m_after)))
    if config.probabilities == "lean":
        slope = 8 * scale
        bias = _fma(-slope, origin, torch.tensor(8 * config.offset + 56 + config.delta)) - 8 * minus_k
        codes = _fma(blocks, slope.unsqueeze(-1), bias.unsqueeze(-1)).round_().clamp_(0, 126)
        blocks.copy_(codes.to(torch.int16).mul_(128).view(torch.float16))
        factor.mul_(256)  # the codes were read as fp16, whose exponent bias is larger by 8
    else:
        bias = -(scale * origin) - minus_k
        # fp64 keeps the addition of B exact; what exp2 sees is y as the kernels round it
        y = _fma(blocks, scale.unsqueeze(-1), bias.unsqueeze(-1)).double().add_(config.offset)
        blocks.copy_(y.exp2_())
        round_to_e4m3(blocks, scratch)
    return blocks, factor, m_after, alpha


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c with one rounding to fp32: fp64 holds the product exactly."""
    return torch.addcmul(c.double(), a.double(), b.double()).float()
