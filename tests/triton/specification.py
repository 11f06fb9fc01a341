"""The numerics of the Triton prefill written down again, in fp64 and one tile after another: an oracle of its own.

One running maximum and one block exponent per tile of 128 keys, which is where these kernels differ from the reference
(exponents per 64 keys).
"""

from __future__ import annotations

import math

import torch

from zyfa_backend.oracle import round_e4m3

TILE = 128


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    c: torch.Tensor,
    first: int,
    *,
    lean: bool = True,
    causal: bool = True,
    window: int | None = None,
    offset: float = 8.0,
    delta: float = -0.45,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One head: q [M, D], k [N, D], v [N, Dv] fp64 values of codes; c [M] log2 units of q·k; first: position of row 0.

    Returns out [M, Dv] and lse [M] (natural log), both fp64 and without the scale of V.
    """
    rows = first + torch.arange(len(q), device=q.device)
    m = torch.full((len(q),), -math.inf, dtype=torch.float64, device=q.device)
    numerator = torch.zeros(len(q), v.shape[1], dtype=torch.float64, device=q.device)
    denominator = torch.zeros_like(m)
    for start in range(0, len(k), TILE):
        keys = torch.arange(start, min(start + TILE, len(k)), device=q.device)
        x = (q @ k[keys].T) * c[:, None]
        unseen = torch.zeros_like(x, dtype=torch.bool)
        if causal:
            unseen |= keys[None] > rows[:, None]
        if window is not None:
            unseen |= keys[None] < rows[:, None] - window
        x.masked_fill_(unseen, -math.inf)
        top = x.amax(1)
        seen = top > -math.inf
        after = torch.maximum(m, top)
        below = torch.where(seen, -torch.ceil(top - after), 0.0).clamp_max(60)
        y = x - torch.where(seen, after, 0.0)[:, None] + (below + offset)[:, None]
        if lean:
            code = torch.round(8 * y + 56 + delta).clamp(0, 126)
            p = torch.where(code < 8, code / 8 * 2.0**-6, torch.exp2(code // 8 - 7) * (1 + code % 8 / 8))
        else:
            p = round_e4m3(torch.exp2(y))
        scale = torch.where(seen, torch.exp2(-below - offset), 0.0)
        alpha = torch.where(m > -math.inf, torch.exp2(m - torch.where(after > -math.inf, after, 0.0)), 0.0)
        numerator = numerator * alpha[:, None] + scale[:, None] * (p @ v[keys])
        denominator = denominator * alpha + scale * p.sum(1)
        m = after
    out = numerator / torch.where(denominator == 0, 1.0, denominator)[:, None]
    return out, (m + torch.log2(denominator)) * math.log(2)
