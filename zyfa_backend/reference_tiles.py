"""The arithmetic of online softmax with per-block scaling, on one panel of scores.

A panel is a run of key blocks (64 keys each, aligned to absolute positions) for a tile of query rows. Within a panel the
blocks are computed side by side: the running maximum after each block is a cumulative maximum, and each block's P
follows from the maximum at its own time exactly as if the blocks had been visited one after the other. The
renormalisations 2^(m - m') of the online rule are then a factor per row and block, applied before one product with V.
"""

from __future__ import annotations

import math

import torch

from zyfa_backend.config import BLOCK, AttentionConfig

LOG2E = 1 / math.log(2)
LN2 = math.log(2)
_E4M3_SMALLEST_NORMAL = 2.0**-6
_LEAN_STEPS = 8  # codes per binade
_LEAN_BIAS = 56  # code of 1.0
_E8M0_SMALLEST = -126


def block_probabilities(
    x: torch.Tensor, m: torch.Tensor, config: AttentionConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P of one panel, in place.

    x: [..., n] fp32 contiguous, scores in log2 units, -inf where masked, n a multiple of config.tile. Overwritten by P,
    each block in its own power of two.
    m: [...] running maximum of the row before the panel, -inf at the start.
    Returns (P as [..., n/64, 64], factor [..., n/64], m' [...]): the panel adds sum_b factor_b · P_b · V_b to the
    numerator and sum_b factor_b · sum(P_b) to the denominator, both relative to m'. A row whose scores hold a NaN gets
    NaN factors and a NaN m'.
    """
    blocks = x.view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    top = blocks.amax(-1)
    if config.probabilities == "none":
        return _unrounded(blocks, top, m)
    running = _running_maximum(top, m, config.tile)
    m_after = running[..., -1]
    origin = torch.where(running == -torch.inf, 0.0, running)  # a row without a live key yet: avoids inf - inf
    # k: binades between the block's maximum and the row's; clamped so that 2^(-k-B) stays an E8M0 scale.
    k = torch.ceil(top - origin).neg_().clamp_max_(math.floor(-_E8M0_SMALLEST - config.offset))
    blocks.sub_(origin.unsqueeze(-1)).add_((k + config.offset).unsqueeze(-1))
    if config.probabilities == "lean":
        p_scale = 256.0
        blocks.copy_(_lean_codes(blocks, config.delta))
    else:
        p_scale = 1.0
        _exact_codes(blocks)
    factor = torch.exp2(running - _finite(m_after).unsqueeze(-1)).mul_(torch.exp2(k.neg_().sub_(config.offset)))
    return blocks, factor.mul_(p_scale), m_after


def combine(
    numerator: torch.Tensor, denominator: torch.Tensor, m: torch.Tensor, v_scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out fp32 [..., Dv], lse fp32 [...] natural log) of the accumulated state; 0 and -inf for a row without a key."""
    safe = torch.where(denominator == 0, 1.0, denominator)
    out = numerator / safe.unsqueeze(-1) * v_scale
    return out, (m + torch.log2(denominator)).mul_(LN2)


def rescale(m_before: torch.Tensor, m_after: torch.Tensor) -> torch.Tensor:
    """2^(m - m'), which is 0 for a row that had no key before; never 0·inf or inf - inf."""
    return torch.exp2(m_before - _finite(m_after))


def _finite(m: torch.Tensor) -> torch.Tensor:
    return torch.where(m == -torch.inf, 0.0, m)


def _running_maximum(top: torch.Tensor, m: torch.Tensor, tile: int) -> torch.Tensor:
    """The maximum in force for each block [..., nb]: renewed after every `tile` keys."""
    if tile == 2 * BLOCK:
        pairs = top.view(*top.shape[:-1], top.shape[-1] // 2, 2).amax(-1, keepdim=True)
        top = pairs.expand(*pairs.shape[:-1], 2).reshape(top.shape)
    running = torch.cat((m.unsqueeze(-1), top), dim=-1)
    return torch.cummax(running, dim=-1).values[..., 1:]


def _unrounded(
    blocks: torch.Tensor, top: torch.Tensor, m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 P of ordinary online softmax, relative to the maximum after the whole panel."""
    m_after = torch.maximum(m, top.amax(-1))
    blocks.sub_(_finite(m_after)[..., None, None]).exp2_()
    return blocks, torch.ones_like(top), m_after


def _exact_codes(y: torch.Tensor) -> None:
    """y becomes 2^y rounded to e4m3, nearest even, subnormals included.

    Adding and subtracting 1.5 · 2^20 · 2^floor(log2 p) leaves p its leading 1 and three bits; below 2^-6 the step stays.
    """
    y.exp2_()
    magic = y.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    magic.clamp_min_(_E4M3_SMALLEST_NORMAL).mul_(1.5 * 2**20)
    y.add_(magic).sub_(magic)


def _lean_codes(y: torch.Tensor, delta: float) -> torch.Tensor:
    """code = clamp(round(8y + 56 + delta), 0, 126) read as e4m3: returns its value / 256 as fp16.

    The code moved into place is the fp16 number, whose exponent bias is larger by 8.
    """
    y.mul_(_LEAN_STEPS).add_(_LEAN_BIAS + delta).round_().clamp_(0, 126)
    return y.to(torch.int16).bitwise_left_shift_(7).view(torch.float16)
