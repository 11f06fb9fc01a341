"""The fused write: rotation, quantisation and the paged KV cache, against a copy of as many bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from . import timing
from .errors import Unavailable
from .kernels import Report, Settings, ratio
from .shapes import Shape

COPIES = 3  # sets of operands that take turns, so that no cache holds the next launch's
BASE = "device-copy"


def measure(shape: Shape, settings: Settings, formats: list[str], report: Report) -> None:
    """Rows for Q alone, K and V into the cache, and all three from a fused QKV tensor, with and without the rotation.

    Those of K and V also come with saturated values counted, as the engines run them ("-counted").
    Each is compared (ratio_to, as times as fast) with the same kernel without the rotation and, by bytes read and
    written, with a device copy (ratio_to device-copy is the share of the copy's bandwidth).
    """
    try:
        import zyfa_kernels.triton.rotate_quantize  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"zyfa's Triton kernels do not load: {error}") from error
    for what in ("q", "kv", "qkv"):
        for form in formats:
            _measure(shape, settings, what, form, report)


def _measure(shape: Shape, settings: Settings, what: str, form: str, report: Report) -> None:
    sets = [_operands(shape, settings.block_size, form, seed) for seed in range(COPIES)]
    moved = _bytes(shape, what)
    calls = _kernels(sets, shape, what, form)
    half = [torch.randint(0, 256, (2, moved // 2), dtype=torch.uint8, device="cuda") for _ in range(COPIES)]
    calls[BASE] = _turns([lambda pair=pair: pair[0].copy_(pair[1]) for pair in half])  # type: ignore[misc]
    engine = _engine_write(sets) if what == "kv" and form == "fp8_e4m3" else None
    if engine is not None:
        calls["vllm/reshape-and-cache-fp8"] = engine
    begin = time.time()
    times = timing.interleaved(calls, settings.warmups, settings.launches, settings.rounds)
    clocks = report.sampler.between(begin, time.time())
    for contender, mine in times.items():
        us = statistics.median(mine)
        report.rows.append(
            {
                "part": "write",
                "kernel": contender,
                "shape": f"{what} {shape}",
                "tflops": None,
                "us": us,
                "us_min": min(mine),
                "us_max": max(mine),
                "us_rounds": mine,
                "launches": settings.launches,
                "bytes": moved,
                "tb_s": moved / us * 1e-6,
                "ratio_to": {other: ratio(mine, theirs) for other, theirs in times.items() if other != contender},
                "clocks": clocks,
            }
        )


def _kernels(sets: list[dict[str, Any]], shape: Shape, what: str, form: str) -> dict[str, Callable[[], object]]:
    """ZYFA's calls by the names of their rows; each takes the sets of operands in turn."""
    name = f"zyfa/rotate-quantize-{what}-{form.removesuffix('_e4m3')}"
    kinds = {name: ("hadamard", False), f"{name}-no-rotation": ("none", False)}
    if what != "q":  # Q's scales are dynamic: nothing saturates
        kinds[f"{name}-counted"] = ("hadamard", True)
    return {key: _turns([_call(one, shape, what, form, *kind) for one in sets]) for key, kind in kinds.items()}


def _bytes(shape: Shape, what: str) -> int:
    """Read and written: two bytes in and one out for each value, a scale for each row of Q, a slot for each token."""
    tokens = shape.batch * shape.seq
    q = tokens * shape.q_heads * (3 * shape.qk_dim + 4)
    kv = tokens * (shape.kv_heads * 3 * (shape.qk_dim + shape.v_dim) + 8)
    return {"q": q, "kv": kv, "qkv": q + kv}[what]


def _turns(calls: list[Callable[[], object]]) -> Callable[[], object]:
    at = 0

    def call() -> object:
        nonlocal at
        at = (at + 1) % len(calls)
        return calls[at]()

    return call


def _operands(shape: Shape, block_size: int, form: str, seed: int, device: str = "cuda") -> dict[str, Any]:
    make = torch.Generator(device).manual_seed(seed)
    tokens = shape.batch * shape.seq
    widths = [shape.q_heads * shape.qk_dim, shape.kv_heads * shape.qk_dim, shape.kv_heads * shape.v_dim]
    qkv = torch.randn(tokens, sum(widths), generator=make, device=device, dtype=torch.bfloat16)
    blocks = -(-tokens // block_size)
    order = torch.randperm(blocks, generator=make, device=device)
    place = torch.arange(tokens, device=device)
    size = (blocks, block_size, shape.kv_heads)
    return {
        "qkv": qkv,
        "q": qkv[:, : widths[0]].contiguous().unflatten(1, (-1, shape.qk_dim)),
        "k": qkv[:, widths[0] : sum(widths[:2])].contiguous().unflatten(1, (-1, shape.qk_dim)),
        "v": qkv[:, sum(widths[:2]) :].contiguous().unflatten(1, (-1, shape.v_dim)),
        "k_cache": torch.zeros(*size, shape.qk_dim, dtype=torch.uint8, device=device),
        "v_cache": torch.zeros(*size, shape.v_dim, dtype=torch.uint8, device=device),
        "slots": order[place // block_size] * block_size + place % block_size,
        # Nothing of a Gaussian saturates at 0.05, as is usual with calibrated scales.
        "scale": torch.full((shape.kv_heads,), 0.05, device=device),
        "saturated": torch.zeros(2, dtype=torch.int64, device=device),
        "out": torch.empty(
            tokens,
            shape.q_heads,
            shape.qk_dim,
            dtype=torch.int8 if form == "int8" else torch.uint8,
            device=device,
        ),
        "q_scale": torch.empty(tokens, shape.q_heads, device=device),
    }


def _call(
    one: dict[str, Any], shape: Shape, what: str, form: str, rotation: str, counted: bool
) -> Callable[[], object]:
    from zyfa_kernels.triton.rotate_quantize import rotate_quantize_q, rotate_quantize_qkv, rotate_quantize_write

    named: dict[str, Any] = {"rotation": rotation, "qk_format": form}
    cache = (one["k_cache"], one["v_cache"], one["slots"], one["scale"], one["scale"])
    outputs: dict[str, Any] = {"out": one["out"], "scale": one["q_scale"]}
    if what == "q":
        return lambda: rotate_quantize_q(one["q"], **named, **outputs)
    if counted:
        named["saturated"] = one["saturated"]
    if what == "kv":
        return lambda: rotate_quantize_write(one["k"], one["v"], *cache, **named)
    named |= {"v_head_dim": shape.v_dim, **outputs}
    sizes = (shape.q_heads, shape.kv_heads, shape.qk_dim)
    return lambda: rotate_quantize_qkv(one["qkv"], *sizes, *cache, **named)


def _engine_write(sets: list[dict[str, Any]]) -> Callable[[], object] | None:
    """vLLM's own write of an fp8 cache, which doesn't rotate, where vLLM is installed and K and V have one width."""
    try:
        from vllm._custom_ops import reshape_and_cache_flash as write
    except ImportError:
        return None
    one = torch.ones(1, device="cuda")

    def call(these: dict[str, Any]) -> Callable[[], object]:
        arguments = (these["k"], these["v"], these["k_cache"], these["v_cache"], these["slots"], "fp8", one, one)
        return lambda: write(*arguments)

    calls = [call(these) for these in sets]
    try:
        calls[0]()
        torch.cuda.synchronize()
    except (RuntimeError, AttributeError, TypeError):  # another width of V, or a vLLM built without it
        return None
    return _turns(calls)
