"""Checks of the arguments of `prefill` and `decode`: each error names the argument, its value and what is accepted."""

from __future__ import annotations

import math
from typing import Any

import torch

HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
BLOCK_SIZES = (16, 32, 64, 128)
CODES = {"fp8_e4m3": (torch.uint8, torch.float8_e4m3fn), "int8": (torch.int8, torch.uint8)}
OUT_DTYPES = (torch.bfloat16, torch.float16)


class PrefillError(ValueError):
    """An argument of `prefill` or `decode` is not accepted; the message names it, its value and what would be."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise PrefillError(message)


def check_scalars(
    softmax_scale: float, window: int | None, p: str, qk_format: str, offset: float, delta: float
) -> None:
    require(0 < softmax_scale < math.inf, f"softmax_scale={softmax_scale!r} is not accepted; it is positive and finite")
    require(
        window is None or (isinstance(window, int) and not isinstance(window, bool) and window >= 0),
        f"window={window!r} is not accepted; None, or how many earlier keys a query sees, >= 0",
    )
    require(p in ("lean", "exact"), f"p={p!r} is not accepted; choose lean or exact")
    require(qk_format in CODES, f"qk_format={qk_format!r} is not accepted; choose one of {', '.join(CODES)}")
    require(-6 <= offset <= 8, f"offset={offset!r} is not accepted; it lies in [-6, 8], where P has e4m3 codes")
    require(-1 <= delta <= 1, f"delta={delta!r} is not accepted; it lies in [-1, 1]")


def check_operands(
    q: Any, k: Any, v: Any, qk_format: str, paged: bool, block_sizes: tuple[int, ...] = BLOCK_SIZES
) -> None:
    rank = 4 if paged else 3
    form = "[num_blocks, block_size, Hkv, D]" if paged else "[Tk, Hkv, D]"
    require(q.dim() == 3, f"q has shape {list(q.shape)}; expected [T, Hq, D]")
    for name, x in (("k_cache", k), ("v_cache", v)):
        require(x.dim() == rank, f"{name} has shape {list(x.shape)}; expected {form}")
        require(x.device == q.device, f"{name} is on {x.device} and q on {q.device}; they must be on one device")
    require(
        k.shape[:-1] == v.shape[:-1],
        f"k_cache has shape {list(k.shape)} and v_cache {list(v.shape)}; all but the channels must agree",
    )
    dims = (q.shape[2], v.shape[-1])
    require(
        dims in HEAD_DIMS and k.shape[-1] == q.shape[2],
        f"head dimensions q {q.shape[2]}, k {k.shape[-1]}, v {v.shape[-1]} have no kernel; "
        "there are kernels for 64/64, 128/128 and 192/128",
    )
    hq, hkv = q.shape[1], k.shape[-2]
    require(
        hq > 0 and hkv > 0 and hq % hkv == 0, f"{hq} query heads are not a positive multiple of {hkv} key-value heads"
    )
    for name, x, format in (("q", q, qk_format), ("k_cache", k, qk_format), ("v_cache", v, "fp8_e4m3")):
        require(
            x.dtype in CODES[format],
            f"{name} has dtype {x.dtype}; format {format} is stored as {' or '.join(map(str, CODES[format]))}",
        )
        require(x.stride(-1) == 1, f"{name} has strides {x.stride()}; its channels must be adjacent")
        aligned = x.data_ptr() % 16 == 0 and all(
            s % 16 == 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1
        )
        require(aligned, f"{name} starts at {x.data_ptr():#x} with strides {x.stride()}; expected multiples of 16")
    if paged:
        require(
            k.shape[1] in block_sizes,
            f"the cache has blocks of {k.shape[1]} tokens; accepted: {', '.join(map(str, block_sizes))}",
        )


def check_lengths(cu_seqlens_q: Any, seqlens_k: Any, cu_seqlens_k: Any, block_table: Any, device: Any) -> None:
    if block_table is None:
        require(cu_seqlens_k is not None, "block_table is None: keys are packed, so cu_seqlens_k must be given")
    else:
        require(seqlens_k is not None, "seqlens_k is None; with a block_table it holds the keys of each sequence")
    given = [("cu_seqlens_q", cu_seqlens_q, 1)]
    if block_table is None:
        given.append(("cu_seqlens_k", cu_seqlens_k, 1))
    else:
        given += [("seqlens_k", seqlens_k, 1), ("block_table", block_table, 2)]
    for name, x, rank in given:
        check_indices(name, x, rank, device)
    batch = cu_seqlens_q.shape[0] - 1
    require(batch >= 0, "cu_seqlens_q is empty; expected [sequences + 1] offsets")
    if block_table is None:
        require(
            cu_seqlens_k.shape[0] == batch + 1,
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} elements; cu_seqlens_q has {batch + 1}",
        )
    else:
        require(
            seqlens_k.shape[0] == batch and block_table.shape[0] == batch,
            f"seqlens_k has {seqlens_k.shape[0]} and block_table {block_table.shape[0]} rows for {batch} sequences",
        )


def check_indices(name: str, x: Any, rank: int, device: Any) -> None:
    require(
        x.dtype == torch.int32 and x.dim() == rank and x.device == device,
        f"{name} is {x.dtype} {list(x.shape)} on {x.device}; expected int32 with {rank} dimensions on {device}",
    )
    require(x.stride(-1) == 1, f"{name} has strides {x.stride()}; its elements must be adjacent")


def check_rows(q: Any, seqlens_k: Any, block_table: Any) -> None:
    """Of `decode`: a row of each for every query."""
    for name, x, rank in (("seqlens_k", seqlens_k, 1), ("block_table", block_table, 2)):
        check_indices(name, x, rank, q.device)
        require(x.shape[0] == q.shape[0], f"{name} has {x.shape[0]} rows for the {q.shape[0]} of q")


def check_room(max_seqlen_k: int, block_table: Any, k_cache: Any) -> None:
    if block_table is not None:
        room = block_table.shape[1] * k_cache.shape[1]
        require(
            max_seqlen_k <= room, f"max_seqlen_k={max_seqlen_k} is more than the {room} tokens of a block_table row"
        )


def check_scales(q: Any, q_scale: Any, k_scale: Any, v_scale: Any, hkv: int) -> None:
    require(
        q_scale.shape == q.shape[:2] and q_scale.dtype == torch.float32 and q_scale.device == q.device,
        f"q_scale is {q_scale.dtype} {list(q_scale.shape)} on {q_scale.device}; "
        f"expected float32 {list(q.shape[:2])}, per token and head, on {q.device}",
    )
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        require(
            x.dtype == torch.float32 and x.device == q.device and (x.numel() == 1 or x.shape == (hkv,)),
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; expected float32 [{hkv}] or [1] on {q.device}",
        )
        require(x.is_contiguous(), f"{name} has strides {x.stride()}; expected it contiguous")


def check_outputs(q: Any, dv: int, out: Any, out_scale: Any, lse: Any) -> None:
    shape = (q.shape[0], q.shape[1], dv)
    fp8 = out is not None and out.dtype == torch.float8_e4m3fn
    if out is not None:
        require(
            out.shape == shape and out.device == q.device and (fp8 or out.dtype in OUT_DTYPES),
            f"out is {out.dtype} {list(out.shape)} on {out.device}; "
            f"expected bfloat16, float16 or float8_e4m3fn {list(shape)} on {q.device}",
        )
        require(out.stride(-1) == 1, f"out has strides {out.stride()}; its channels must be adjacent")
    if fp8:
        require(out_scale is not None, "out is float8_e4m3fn; out_scale must be given")
    else:
        require(out_scale is None, "out_scale is given, but out is not float8_e4m3fn")
    if out_scale is not None:
        require(
            out_scale.dtype == torch.float32 and out_scale.numel() == 1 and out_scale.device == q.device,
            f"out_scale is {out_scale.dtype} {list(out_scale.shape)} on {out_scale.device}; "
            f"expected one float32 on {q.device}",
        )
    if lse is not None:
        require(
            lse.shape == (shape[1], shape[0]) and lse.dtype == torch.float32 and lse.device == q.device,
            f"lse is {lse.dtype} {list(lse.shape)} on {lse.device}; expected float32 [{shape[1]}, {shape[0]}]",
        )
        require(lse.stride(-1) == 1, f"lse has strides {lse.stride()}; the rows of a head must be adjacent")
