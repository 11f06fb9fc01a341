"""Checks of the arguments of `prefill` and `decode`: each error names the argument, its value and what is accepted."""

from __future__ import annotations

import math
from numbers import Integral, Real
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


def check_tensors(required: dict[str, Any], optional: dict[str, Any]) -> None:
    """At each launch, before anything reads a shape: tensors are tensors."""
    for name, x in required.items():
        if not isinstance(x, torch.Tensor):
            raise PrefillError(f"{name}={x!r} is not accepted; expected a tensor")
    for name, x in optional.items():
        if x is not None and not isinstance(x, torch.Tensor):
            wanted = "a tensor, True, False or None" if name == "lse" else "a tensor or None"
            raise PrefillError(f"{name}={x!r} is not accepted; expected {wanted}")


def check_ranks(q: Any, k: Any, v: Any, paged: bool) -> None:
    """At each launch, after `check_tensors`."""
    rank = 4 if paged else 3
    if q.dim() != 3:
        raise PrefillError(f"q has shape {list(q.shape)}; expected [T, Hq, D]")
    if k.dim() != rank or v.dim() != rank:
        name, x = ("k_cache", k) if k.dim() != rank else ("v_cache", v)
        form = "[num_blocks, block_size, Hkv, D]" if paged else "[Tk, Hkv, D]"
        raise PrefillError(f"{name} has shape {list(x.shape)}; expected {form}")


def is_a(kind: type, x: Any) -> bool:
    """Whether x is a number of a kind, bool not being one."""
    return isinstance(x, kind) and not isinstance(x, bool)


def check_scalars(softmax_scale: Any, window: Any, p: Any, qk_format: Any, offset: Any, delta: Any) -> None:
    require(
        is_a(Real, softmax_scale) and 0 < softmax_scale < math.inf,
        f"softmax_scale={softmax_scale!r} is not accepted; it is positive and finite",
    )
    require(
        window is None or (is_a(Integral, window) and window >= 0),
        f"window={window!r} is not accepted; None, or how many earlier keys a query sees, >= 0",
    )
    require(p in ("lean", "exact"), f"p={p!r} is not accepted; choose lean or exact")
    require(qk_format in tuple(CODES), f"qk_format={qk_format!r} is not accepted; choose one of {', '.join(CODES)}")
    require(
        is_a(Real, offset) and -6 <= offset <= 8,
        f"offset={offset!r} is not accepted; it lies in [-6, 8], where P has e4m3 codes",
    )
    require(is_a(Real, delta) and -1 <= delta <= 1, f"delta={delta!r} is not accepted; it lies in [-1, 1]")


def check_causal(causal: Any) -> None:
    require(isinstance(causal, bool), f"causal={causal!r} is not accepted; choose True or False")


def check_longest(name: str, longest: Any, least: int) -> None:
    require(
        is_a(Integral, longest) and longest >= least,
        f"{name}={longest!r} is not accepted; an integer, at least the longest of the batch and at least {least} here",
    )


def check_operands(
    q: Any, k: Any, v: Any, qk_format: str, paged: bool, block_sizes: tuple[int, ...] = BLOCK_SIZES
) -> None:
    for name, x in (("k_cache", k), ("v_cache", v)):
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


def check_out(q: Any, dv: int, out: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    shape = (*q.shape[:2], dv)
    require(
        out.shape == shape and out.device == q.device and out.dtype in dtypes,
        f"out is {out.dtype} {list(out.shape)} on {out.device}; "
        f"expected {' or '.join(map(str, dtypes))} {list(shape)} on {q.device}",
    )
    require(out.stride(-1) == 1, f"out has strides {out.stride()}; its channels must be adjacent")


def check_out_scale_and_lse(q: Any, out: Any, out_scale: Any, lse: Any) -> None:
    if out.dtype == torch.float8_e4m3fn:
        require(out_scale is not None, "out_scale is None; out is float8_e4m3fn, so it must be given")
    else:
        require(out_scale is None, f"out_scale is given, but out is {out.dtype} and not float8_e4m3fn")
    if out_scale is not None:
        require(
            out_scale.dtype == torch.float32 and out_scale.numel() == 1 and out_scale.device == q.device,
            f"out_scale is {out_scale.dtype} {list(out_scale.shape)} on {out_scale.device}; "
            f"expected one float32 on {q.device}",
        )
    if lse is not None:
        require(
            lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32 and lse.device == q.device,
            f"lse is {lse.dtype} {list(lse.shape)} on {lse.device}; "
            f"expected float32 [{q.shape[1]}, {q.shape[0]}] on {q.device}",
        )
        require(lse.stride(-1) == 1, f"lse has strides {lse.stride()}; the rows of a head must be adjacent")
