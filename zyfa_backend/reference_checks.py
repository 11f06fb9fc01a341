"""Checks of the arguments of attention calls: each error names the argument, its value and what is accepted."""

from __future__ import annotations

import torch

from zyfa_backend.config import AttentionConfig


class AttentionError(ValueError):
    """An argument of an attention call is not accepted; the message names it, its value and what would be."""


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], Hq a multiple of Hkv, one device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise AttentionError(f"{name} has shape {list(x.shape)}; expected [tokens, heads, channels]")
        if x.device != q.device:
            raise AttentionError(f"{name} is on {x.device} and q on {q.device}; they must be on one device")
    if k.shape[:2] != v.shape[:2]:
        raise AttentionError(f"k has shape {list(k.shape)} and v {list(v.shape)}; tokens and heads must agree")
    if q.shape[2] != k.shape[2]:
        raise AttentionError(f"q has {q.shape[2]} channels and k {k.shape[2]}; they must agree")
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise AttentionError(f"{q.shape[1]} query heads are not a positive multiple of {k.shape[1]} key-value heads")


def check_scales(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hq: int, hkv: int, tq: int) -> None:
    """Scales of Q [Tq, Hq] and of K and V (scalar or [Hkv])."""
    if q.shape != (tq, hq):
        raise AttentionError(f"the scale of q has shape {list(q.shape)}; expected [{tq}, {hq}], per token and head")
    check_stored_scale("k", k, hkv)
    check_stored_scale("v", v, hkv)


def check_stored_scale(name: str, scale: torch.Tensor, hkv: int) -> None:
    """The scale of K or V, a scalar or [Hkv]."""
    if scale.numel() != 1 and scale.shape != (hkv,):
        raise AttentionError(f"the scale of {name} has shape {list(scale.shape)}; expected a scalar or [{hkv}]")


def check_scalars(softmax_scale: float, window: int | None) -> None:
    if not 0 < softmax_scale < float("inf"):
        raise AttentionError(f"softmax_scale={softmax_scale!r} is not accepted; it is positive and finite")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise AttentionError(f"window={window!r} is not accepted; None, or how many earlier keys a query sees, >= 0")


def sequence_bounds(cu_seqlens: torch.Tensor | None, total: int, name: str) -> list[int]:
    """cu_seqlens as integers, from 0 to `total`; one sequence if None."""
    if cu_seqlens is None:
        return [0, total]
    bounds = [int(b) for b in cu_seqlens]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or sorted(bounds) != bounds:
        raise AttentionError(f"{name} is {bounds}; expected offsets that rise from 0 to {total}")
    return bounds


def check_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_len: int,
    config: AttentionConfig,
) -> list[int]:
    """Checks the arguments of `decode`; returns seq_lens as integers."""
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise AttentionError(
            f"k_cache has shape {list(k_cache.shape)} and v_cache {list(v_cache.shape)}; "
            "expected [num_blocks, block_size, Hkv, D] with the first three alike"
        )
    check_operands(q, k_cache[0], v_cache[0])
    for name, cache, format in (("k_cache", k_cache, config.qk_format), ("v_cache", v_cache, config.v_format)):
        accepted = {"fp8_e4m3": (torch.uint8,), "int8": (torch.int8, torch.uint8)}.get(format)
        if accepted is not None and cache.dtype not in accepted:
            raise AttentionError(f"{name} has dtype {cache.dtype}; format {format} is stored as {accepted[0]}")
        if accepted is None and not cache.dtype.is_floating_point:
            raise AttentionError(f"{name} has dtype {cache.dtype}; format none is stored in a floating dtype")
    if isinstance(q_len, bool) or not isinstance(q_len, int) or q_len < 1:
        raise AttentionError(f"q_len={q_len!r} is not accepted; it is the number of new tokens per sequence, >= 1")
    lengths = seq_lens.tolist()
    if block_table.dim() != 2 or block_table.shape[0] != len(lengths) or q.shape[0] != len(lengths) * q_len:
        raise AttentionError(
            f"q has {q.shape[0]} rows, block_table {list(block_table.shape)}, seq_lens {len(lengths)}, q_len {q_len}; "
            "expected B·q_len rows, [B, n] and B"
        )
    room = block_table.shape[1] * k_cache.shape[1]
    for length in lengths:
        if not q_len <= length <= room:
            raise AttentionError(
                f"seq_lens holds {length}; accepted: from q_len = {q_len} to the {room} tokens of a block_table row"
            )
    return lengths
