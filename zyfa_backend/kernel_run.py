"""Runs a gfx950 kernel on generated or captured inputs, on the emulator or a GPU, and compares with the reference."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zyfa_backend import reference
from zyfa_backend.config import EXACT, LEAN, AttentionConfig
from zyfa_backend.quantization import Quantized, calibrate_scale, e4m3_decode, quantize_kv, quantize_q

INPUTS = ("gaussian", "peaked", "ones")
PEAKED = 6.0  # factor on the queries: a few keys take nearly all weight
TILE = 128  # keys after which these kernels renew the running maximum
LOG2E = 1 / math.log(2)


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
    kind: str, seq: int, q_heads: int, kv_heads: int, context: int, causal: bool, lean: bool, seed: int
) -> Problem:
    """Gaussian Q, K, V in bf16; "peaked" scales Q by PEAKED, "ones" sets V to 1."""
    if seq < 1 or context < 0:
        raise RunError(f"seq={seq}, context={context} are not accepted; seq is at least 1 and context at least 0")
    if q_heads < 1 or kv_heads < 1 or q_heads % kv_heads:
        raise RunError(f"q_heads={q_heads} is not a multiple of kv_heads={kv_heads}")
    make = torch.Generator().manual_seed(seed)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 128, generator=make).bfloat16()

    q, k, v = normal(seq, q_heads), normal(seq + context, kv_heads), normal(seq + context, kv_heads)
    if kind == "peaked":
        q = q * PEAKED
    if kind == "ones":
        v = torch.ones_like(v)
    return quantize(q, k, v, causal, lean, v_scale=torch.ones(kv_heads) if kind == "ones" else None)


def load(path: Path, layer: int | None, seq: int | None, causal: bool, lean: bool) -> Problem:
    """q, k, v [tokens, heads, 128] of an .npz file; of several layers (`layer3.q`, `3/q`, `q_3`) the chosen one."""
    try:
        archive = np.load(path)
    except (OSError, ValueError) as error:
        raise RunError(f"--input {str(path)!r} is not readable as .npz: {error}") from error
    found: dict[str, dict[str, np.ndarray]] = {}
    for key in archive.files:
        words = [w for w in key.replace("/", " ").replace(".", " ").replace("_", " ").split() if w]
        letters = [w for w in words if w in ("q", "k", "v")]
        if letters:
            number = "".join(c for w in words for c in w if c.isdigit())
            found.setdefault(number, {})[letters[0]] = archive[key]
    wanted = str(layer) if layer is not None else next(iter(found), "")
    if set(found.get(wanted, {})) != {"q", "k", "v"} or (layer is None and len(found) > 1):
        raise RunError(
            f"--input {str(path)!r} holds {', '.join(archive.files)}; wanted q, k, v, or --layer of one that has them"
        )
    tensors = {n: torch.from_numpy(np.asarray(a, np.float32)).bfloat16() for n, a in found[wanted].items()}
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.shape[2] != 128:
            raise RunError(f"{name} in {str(path)!r} has shape {list(tensor.shape)}; wanted [tokens, heads, 128]")
    q, k, v = (tensors[n][:seq] if seq else tensors[n] for n in "qkv")
    return quantize(q, k, v, causal, lean)


def quantize(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, lean: bool, v_scale: torch.Tensor | None = None
) -> Problem:
    """Rotate and quantise as the engine path does, K and V with a scale per head."""
    config = config_of(lean)
    k_scale = calibrate_scale(k, rotation=config.rotation)
    v_scale = calibrate_scale(v) if v_scale is None else v_scale
    return Problem(
        quantize_q(q, config),
        Quantized(quantize_kv(k, k_scale, config.qk_format, config.rotation), k_scale, config.qk_format),
        Quantized(quantize_kv(v, v_scale, config.v_format), v_scale, config.v_format),
        causal,
        1 / math.sqrt(q.shape[2]),
        config,
    )


@cache
def _loaded(name: str) -> Any:
    from zyfa_kernels.emulator import CodeObject
    from zyfa_kernels.runtime.cache import code_object

    return CodeObject.load(code_object(name))


def on_emulator(name: str, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(out bf16 [Tq, Hq, 128], lse [Hq, Tq], wave-instructions executed)."""
    from zyfa_kernels.emulator import Emulator

    emulator = Emulator(_loaded(name))
    memory = emulator.memory
    tq, hq = problem.q.data.shape[:2]
    out, lse = memory.alloc(tq * hq * 256), memory.alloc(tq * hq * 4)
    launch = _launch(name, problem, lambda t: memory.upload(t.contiguous().numpy()), out, lse)
    emulator.launch(launch.symbol, launch.grid, launch.block, launch.kernarg)
    bits = memory.download(out, np.int16, (tq, hq, 128))
    result = torch.from_numpy(bits).view(torch.bfloat16)
    return result, torch.from_numpy(memory.download(lse, np.float32, (hq, tq))), emulator.stats.instructions


def on_gpu(name: str, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The same on the current AMD GPU; instructions are not counted there (0)."""
    from zyfa_kernels.runtime import hip

    kept = []

    def upload(tensor: torch.Tensor) -> int:
        data = tensor.contiguous().numpy().tobytes()
        kept.append(hip.Buffer(len(data)))
        kept[-1].write(data)
        return kept[-1].address

    tq, hq = problem.q.data.shape[:2]
    out, lse = hip.Buffer(tq * hq * 256), hip.Buffer(tq * hq * 4)
    hip.run(_launch(name, problem, upload, out.address, lse.address))
    hip.synchronize()
    result = torch.frombuffer(bytearray(out.read()), dtype=torch.bfloat16).view(tq, hq, 128)
    return result, torch.frombuffer(bytearray(lse.read()), dtype=torch.float32).view(hq, tq), 0


def _launch(name: str, problem: Problem, upload, out: int, lse: int):
    from zyfa_kernels.runtime.attention import Array, attention_launch

    (tq, hq, dim), (tk, hkv, _) = problem.q.data.shape, problem.k.data.shape

    def lengths(n: int) -> int:
        return upload(torch.tensor([0, n], dtype=torch.int32))

    return attention_launch(
        name,
        q=Array(upload(problem.q.data), hq * dim, dim),
        k=Array(upload(problem.k.data), hkv * dim, dim),
        v=Array(upload(problem.v.data), hkv * dim, dim),
        out=Array(out, hq * dim * 2, dim * 2),
        lse=lse,
        lse_head=tq * 4,
        q_scale=Array(upload(problem.q.scale), hq * 4, 4),
        k_scale=upload(problem.k.scale.reshape(-1)),
        v_scale=upload(problem.v.scale.reshape(-1)),
        scale_per_head=problem.k.scale.numel() > 1,
        cu_seqlens_q=lengths(tq),
        cu_seqlens_k=lengths(tk),
        batch=1,
        max_seqlen_q=tq,
        max_seqlen_k=tk,
        q_heads=hq,
        kv_heads=hkv,
        softmax_scale=problem.softmax_scale,
        delta=problem.config.delta,
        window=problem.window,
    )


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


def compare(name: str, problem: Problem, on: str) -> dict[str, Any]:
    """Run and compare; see `judge` for the errors, `seconds` is the kernel's run alone."""
    start = time.perf_counter()
    out, lse, instructions = (on_emulator if on == "emulator" else on_gpu)(name, problem)
    seconds = time.perf_counter() - start
    return {**judge(problem, out, lse), "instructions": instructions, "seconds": seconds}


def judge(problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> dict[str, float]:
    """Errors of out bf16 [Tq, Hq, 128] and lse [Hq, Tq].

    rel_rms, rel_rms_reference: relative root-mean-square error of the kernel and of the reference against fp64.
    max_abs, lse_max_abs: largest difference from the reference, which rounds as the kernels do (arithmetic "fused":
    else a score next to a rounding tie of P may fall either way). beyond_bf16: share of the elements that differ from
    the reference by more than one bf16 step and 1e-6 of the output's size, what fp32 sums leave next to zero.
    """
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
    exact, _ = in_fp64(problem)
    got, ref = out.double().numpy(), expected.double().numpy()
    size = float(np.sqrt((exact**2).mean()))
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(ref), 2.0**-126))) - 7)
    return {
        "rel_rms": float(np.sqrt(((got - exact) ** 2).mean())) / size,
        "rel_rms_reference": float(np.sqrt(((ref - exact) ** 2).mean())) / size,
        "max_abs": float(np.abs(got - ref).max()),
        "lse_max_abs": float((lse - expected_lse).abs().max()),
        "beyond_bf16": float((np.abs(got - ref) > step + 1e-6 * size).mean()),
    }
