"""Runs a gfx950 kernel on generated or captured inputs, on the emulator or a GPU, and compares with the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from zyfa_backend import reference
from zyfa_backend.config import EXACT, LEAN, AttentionConfig
from zyfa_backend.kernel_devices import Device, EmulatorDevice, GpuDevice, launch, loaded
from zyfa_backend.quantization import Quantized, calibrate_scale, e4m3_decode, quantize_kv, quantize_q
from zyfa_backend.reference_tiles import LOG2E

INPUTS = ("gaussian", "peaked", "ones")
DEVICES = ("emulator", "gpu")
PEAKED = 6.0  # factor on the queries: a few keys take nearly all weight
TILE = 128  # keys after which these kernels renew the running maximum
HEAD_DIM = 128
# Next to zero, fp32 sums in another order differ by up to 1.3e-6 of the outputs' size (seen in 628 million elements).
NEAR_ZERO = 2e-6
LARGEST_SCORE = 2.0**24  # in log2 units; beyond, fp32 is too coarse for a difference of two to stay below P's 448
MOST_INSTRUCTIONS = 20_000_000  # of a run with late loads: some hundred times what a kernel takes
MAX_TOKENS, MAX_HEADS, MAX_SEED = 1 << 20, 1024, (1 << 63) - 1
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RunError(ValueError):
    """An input of a run is not accepted; the message names it, its value and what would be."""


@dataclass(frozen=True)
class Problem:
    """Quantised operands of one sequence: q [Tq, Hq, 128], k and v [Tk, Hkv, 128]."""

    q: Quantized
    k: Quantized
    v: Quantized
    causal: bool
    softmax_scale: float
    config: AttentionConfig
    window: int | None = None


def config_of(lean: bool) -> AttentionConfig:
    """The numerics that the kernels implement: one maximum a tile of 128 keys, one multiply-add a score."""
    return replace(LEAN if lean else EXACT, tile=TILE, arithmetic="fused")


def generate(
    kind: str,
    lengths: Sequence[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    causal: bool,
    lean: bool,
    seed: int,
    window: int | None = None,
) -> list[Problem]:
    """A batch of sequences of (query tokens, keys before the first query): Gaussian Q, K, V in bf16.

    kind: "peaked" scales Q by PEAKED, "ones" sets V to 1. Raises RunError.
    """
    for label, values, least, most in (
        ("seq", [seq for seq, _ in lengths], 1, MAX_TOKENS),
        ("context", [context for _, context in lengths], 0, MAX_TOKENS),
        ("q_heads", [q_heads], 1, MAX_HEADS),
        ("kv_heads", [kv_heads], 1, MAX_HEADS),
        ("seed", [seed], 0, MAX_SEED),
    ):
        for value in values:
            if not least <= value <= most:
                raise RunError(f"{label}={value} is not accepted; it lies in {least} .. {most}")
    if q_heads % kv_heads:
        raise RunError(f"q_heads={q_heads} is not a multiple of kv_heads={kv_heads}")
    if kind not in INPUTS:
        raise RunError(f"kind={kind!r} is not accepted; choose {', '.join(INPUTS)}")
    make = torch.Generator().manual_seed(seed)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=make).bfloat16()

    def one(seq: int, context: int) -> QKV:
        q, k, v = normal(seq, q_heads), normal(seq + context, kv_heads), normal(seq + context, kv_heads)
        return q * PEAKED if kind == "peaked" else q, k, torch.ones_like(v) if kind == "ones" else v

    batch = [one(seq, context) for seq, context in lengths]
    v_scale = torch.ones(kv_heads) if kind == "ones" else None
    return quantize(batch, causal, lean, v_scale=v_scale, window=window)


def quantize(
    batch: Sequence[QKV],
    causal: bool,
    lean: bool,
    *,
    v_scale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> list[Problem]:
    """Rotate and quantise as the engine path does, K and V with a scale per head that the batch shares."""
    config = config_of(lean)
    k_scale = calibrate_scale(torch.cat([k for _, k, _ in batch]), rotation=config.rotation)
    v_scale = calibrate_scale(torch.cat([v for _, _, v in batch])) if v_scale is None else v_scale
    return [
        Problem(
            quantize_q(q, config),
            Quantized(quantize_kv(k, k_scale, config.qk_format, config.rotation), k_scale, config.qk_format),
            Quantized(quantize_kv(v, v_scale, config.v_format), v_scale, config.v_format),
            causal,
            1 / math.sqrt(HEAD_DIM) if softmax_scale is None else softmax_scale,
            config,
            window,
        )
        for q, k, v in batch
    ]


def in_fp64(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(out [Tq, Hq, 128], lse [Hq, Tq]) by plain softmax in fp64 on the same quantised operands."""
    group = problem.q.data.shape[1] // problem.k.data.shape[1]

    def values(x: Quantized, scale: torch.Tensor) -> np.ndarray:
        return e4m3_decode(x.data).double().mul(scale.double()).numpy()

    q = values(problem.q, problem.q.scale[..., None])
    k, v = (values(x, x.scale.reshape(1, -1, 1)) for x in (problem.k, problem.v))
    out, lse = np.empty(q.shape), np.empty((q.shape[1], q.shape[0]))
    context = len(k) - len(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * problem.softmax_scale
        if problem.causal:
            scores[np.arange(len(k))[None] > np.arange(len(q))[:, None] + context] = -np.inf
        if problem.window is not None:
            scores[np.arange(len(k))[None] < np.arange(len(q))[:, None] + context - problem.window] = -np.inf
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        out[:, head] = weights / total @ v[:, head // group]
        lse[head] = (top + np.log(total))[:, 0]
    return out, lse


def compare(name: str, problems: Sequence[Problem], on: str, page: int | None = None) -> dict[str, Any]:
    """Run and compare; see `judge` for the errors, `seconds` is the kernel's run alone. page: see `launch`."""
    if on not in DEVICES:
        raise RunError(f"on={on!r} is not accepted; choose {' or '.join(DEVICES)}")
    if page is not None and (page < 8 or page & (page - 1)):
        raise RunError(f"page={page} is not accepted; a power of two from 8 on is")
    device: Device = EmulatorDevice(loaded(name)) if on == "emulator" else GpuDevice()
    for problem in problems:
        _check_range(problem)
    start = time.perf_counter()
    outputs, instructions = launch(device, name, problems, page=page)
    seconds = time.perf_counter() - start
    wrong = sum(int((~torch.isfinite(x)).sum()) for pair in outputs for x in pair if x is not None)
    if wrong:
        raise RuntimeError(f"{name} gave {wrong} values that are not finite, of finite inputs")
    return {**judge(problems, outputs), "instructions": instructions, "seconds": seconds}


def _check_range(problem: Problem) -> None:
    """Raises RunError where scores could be too large for the kernels."""
    scale = problem.softmax_scale * LOG2E * HEAD_DIM
    largest = scale * 448.0**2 * float(problem.q.scale.double().max()) * float(problem.k.scale.double().max())
    if not largest <= LARGEST_SCORE:
        raise RunError(
            f"scores of up to {largest:.3g} (softmax_scale · log2(e) · {HEAD_DIM} · the largest |q| and |k|) are not "
            f"accepted; {LARGEST_SCORE:.3g} is the most"
        )


def judge(
    problems: Sequence[Problem], outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
) -> dict[str, float]:
    """Errors of (out bf16 [Tq, Hq, 128], lse [Hq, Tq]) of each problem, over the batch.

    rel_rms, rel_rms_reference: relative root-mean-square error of the kernel and of the reference against fp64.
    max_abs, lse_max_abs: largest difference from the reference, which rounds as the kernels do (arithmetic "fused":
    else a score next to a rounding tie of P may fall either way). beyond_bf16: share of the elements that differ from
    the reference by more than one bf16 step and NEAR_ZERO of the output's size.
    """
    rows, lse_max_abs = [], 0.0
    for problem, (out, lse) in zip(problems, outputs, strict=True):
        expected, expected_lse = reference.attend(
            problem.q,
            problem.k,
            problem.v,
            softmax_scale=problem.softmax_scale,
            causal=problem.causal,
            window=problem.window,
            config=problem.config,
            out_dtype=torch.bfloat16,
        )
        rows.append([x.reshape(-1) for x in (out.double().numpy(), expected.double().numpy(), in_fp64(problem)[0])])
        if lse is not None:
            same = lse == expected_lse  # -inf of rows that see no key
            lse_max_abs = max(lse_max_abs, float(torch.where(same, 0.0, (lse - expected_lse).abs()).max()))
    got, ref, exact = (np.concatenate(column) for column in zip(*rows, strict=True))
    size = float(np.sqrt((exact**2).mean())) or 1.0
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(ref), 2.0**-126))) - 7)
    return {
        "rel_rms": float(np.sqrt(((got - exact) ** 2).mean())) / size,
        "rel_rms_reference": float(np.sqrt(((ref - exact) ** 2).mean())) / size,
        "max_abs": float(np.abs(got - ref).max()),
        "lse_max_abs": lse_max_abs,
        "beyond_bf16": 1 - float((np.abs(got - ref) <= step + NEAR_ZERO * size).mean()),
    }


def delayed_run(name: str, code: Any = None) -> list[Any]:
    """EmulatorErrors of kernel `name` (or of `code`, a variation of it) when every load takes its time.

    One to eight tiles of keys, so that the loop is entered and passed at each of its stages; a missing wait or barrier
    is found where what it guards is used.
    """
    from zyfa_kernels.emulator import EmulatorError
    from zyfa_kernels.runtime.registry import kernel

    made = kernel(name).properties
    lengths = [(2, TILE * tiles - 2) for tiles in range(1, 9)]
    options = {"collect_hazards": True, "max_instructions": MOST_INSTRUCTIONS}
    device = EmulatorDevice(loaded(name) if code is None else code, delayed=True, **options)
    try:
        launch(device, name, generate("gaussian", lengths, 1, 1, made["causal"], made["lean"], 0))
    except EmulatorError as error:
        return [*device.emulator.hazards, error]
    return device.emulator.hazards
