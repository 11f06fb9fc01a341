"""The arithmetic of online softmax with per-block scaling, on one panel of scores.

A panel is a run of key blocks (64 keys each, aligned to absolute positions) for a tile of query rows. Within a panel
the blocks are computed side by side: the running maximum after each block is a cumulative maximum, and each block's P
follows from the maximum at its own time exactly as if the blocks had been visited one after the other. The
renormalisations 2^(m - m') of the online rule are then a factor per row and block, applied before one product with V.
"""

from __future__ import annotations

import math
from typing import cast

import torch

from zyfa_backend.config import BLOCK, AttentionConfig

LOG2E = 1 / math.log(2)
LN2 = math.log(2)
_E4M3_SMALLEST_NORMAL = 2.0**-6
_LEAN_STEPS = 8  # codes per binade
_LEAN_BIAS = 56  # code of 1.0
_E8M0_SMALLEST = -126
_LOWEST = torch.finfo(torch.float32).min


def block_probabilities(
    x: torch.Tensor, m: torch.Tensor, config: AttentionConfig, scratch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P of one panel, in place.

    x: [..., n] fp32 contiguous, scores in log2 units, -inf where masked, n a multiple of config.tile. Overwritten by P,
    each block in its own power of two.
    m: [...] running maximum of the row before the panel, -inf at the start.
    scratch: fp32, at least as many elements as x, overwritten.
    Returns (P as [..., n/64, 64], factor [..., n/64], m' [...]): the panel adds sum_b factor_b · P_b · V_b to the
    numerator and sum_b factor_b · sum(P_b) to the denominator, both relative to m'. A row whose scores hold a NaN gets
    NaN factors and a NaN m'.
    """
    blocks = x.view(*x.shape[:-1], -1, BLOCK)
    top = blocks.amax(-1)
    if config.probabilities == "none":
        return _unrounded(blocks, top, m)
    running = _running_maximum(top, m, config.tile)
    origin = _finite(running)
    # k: binades between the block's maximum and the row's; clamped so that 2^(-k-B) stays an E8M0 scale.
    k = torch.ceil(top - origin).neg_().clamp_max_(math.floor(-_E8M0_SMALLEST - config.offset))
    blocks.sub_(origin.unsqueeze(-1)).add_((k + config.offset).unsqueeze(-1))
    factor = torch.exp2(running - origin[..., -1:]).mul_(torch.exp2(k.neg_().sub_(config.offset)))
    if config.probabilities == "lean":
        _lean_codes(blocks, config.delta, scratch)
        factor.mul_(256)
    else:
        _exact_codes(blocks, scratch)
    return blocks, factor, running[..., -1]


def weights(
    x: torch.Tensor, m: torch.Tensor, config: AttentionConfig, scratch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What multiplies V: P of one panel times its blocks' factors, in place of the scores; else as block_probabilities.

    Returns (sums over the panel's keys [...], m' [...]), both relative to m' as x is.
    """
    p, factor, m_after = block_probabilities(x, m, config, scratch)
    p.mul_(factor.unsqueeze(-1))
    return x.sum(-1), m_after


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


def mask_scores(
    x: torch.Tensor, first: int, k0: int, tk: int, causal: bool, window: int | None
) -> torch.Tensor | None:
    """-inf in x [..., R, n] where the query at position first + r does not see key k0 + j of tk keys.

    Writes only the columns that some query does not see. Returns whether live, bool [R, n], None if all are.
    """
    rows, n = x.shape[-2:]
    last = first + rows - 1
    cut_above = causal and k0 + n - 1 > first
    cut_below = window is not None and k0 < last - window
    if not (cut_above or cut_below or k0 + n > tk):
        return None
    key = torch.arange(k0, k0 + n, device=x.device)
    query = torch.arange(first, last + 1, device=x.device).unsqueeze(1)
    live = (key < tk).repeat(rows, 1)
    if cut_above:
        live &= key <= query
    if cut_below and window is not None:
        live &= key >= query - window
    start = 0 if cut_below else max(0, min(first + 1 if cut_above else tk, tk) - k0)
    stop = n if cut_above or k0 + n > tk else max(0, min(n, last - cast(int, window) - k0))
    x[..., start:stop].masked_fill_(~live[:, start:stop], -torch.inf)
    return live


def split_poison(values: torch.Tensor) -> torch.Tensor | None:
    """Replaces what is not finite in values [H, T, D] by 0; returns where that was, fp32 0 or 1, or None if nowhere.

    A product would carry 0 · NaN of a masked key into every row of the tile.
    """
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return None
    values.masked_fill_(bad, 0)
    return bad.float()


def poison(numerator: torch.Tensor, bad: torch.Tensor, live: torch.Tensor | None) -> None:
    """NaN in numerator [H, G, R, Dv] where a live key has a bad value; bad: [H, n, Dv], live: [R, n] or None."""
    touched = bad.amax(dim=1, keepdim=True) if live is None else torch.matmul(live.float(), bad)
    numerator.masked_fill_((touched > 0).unsqueeze(1), torch.nan)


def per_q_head(scale: torch.Tensor, hq: int, hkv: int) -> torch.Tensor:
    """scale (scalar or [Hkv]) as fp32 [Hq]."""
    scale = scale.float()
    return scale.reshape(1).expand(hq) if scale.numel() == 1 else scale.repeat_interleave(hq // hkv)


def _finite(m: torch.Tensor) -> torch.Tensor:
    """m, and the lowest number for a row without a live key yet: avoids inf - inf."""
    return m.clamp_min(_LOWEST)


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


def _exact_codes(y: torch.Tensor, scratch: torch.Tensor) -> None:
    """y becomes 2^y rounded to e4m3."""
    round_to_e4m3(y.exp2_(), scratch)


def round_to_e4m3(y: torch.Tensor, scratch: torch.Tensor) -> None:
    """y, not negative, rounded to e4m3 in place, nearest even, subnormals included.

    Adding and subtracting 1.5 · 2^20 · 2^floor(log2 p) leaves p its leading 1 and three bits; below 2^-6 the step is
    that of 2^-6.
    """
    magic = scratch[: y.numel()].view(y.shape)
    torch.bitwise_and(y.view(torch.int32), 0x7F800000, out=magic.view(torch.int32))
    magic.clamp_min_(_E4M3_SMALLEST_NORMAL).mul_(1.5 * 2**20)
    y.add_(magic).sub_(magic)


def _lean_codes(y: torch.Tensor, delta: float, scratch: torch.Tensor) -> None:
    """y becomes 1/256 of the e4m3 number with code clamp(round(8y + 56 + delta), 0, 126).

    The code moved into place is the fp16 number, whose exponent bias is larger by 8.
    """
    y.mul_(_LEAN_STEPS).add_(_LEAN_BIAS + delta).round_().clamp_(0, 126)
    codes = scratch.view(torch.int16)[: y.numel()].view(y.shape)
    y.copy_(codes.copy_(y).mul_(128).view(torch.float16))
