"""What is timed: ZYFA's prefill kernels and the peers found on the machine, each as a call on a problem's operands.

A maker takes a Problem and the tokens of a block, prepares operands (quantised outside of the timed call) and returns
the call, which gives the output [T, Hq, Dv] or the peer's own layout of it. It raises Unavailable with the reason where
it can't. Peers that read packed keys make nothing of the block size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from zyfa_backend.config import EXACT, LEAN
from zyfa_backend.dispatch import Shape as KernelShape
from zyfa_backend.dispatch import kernel_name

from .errors import Unavailable
from .shapes import Problem

Call = Callable[[], torch.Tensor]
Maker = Callable[[Problem, int], Call]
E4M3_MAX = 448.0
VARIANTS = {
    "fp8-lean": LEAN,
    "fp8-exact": EXACT,
    "int8-lean": replace(LEAN, qk_format="int8"),
    "int8-exact": replace(EXACT, qk_format="int8"),
}
PEERS: dict[str, Maker] = {}


def peer(name: str) -> Callable[[Callable[[Problem], Call]], Callable[[Problem], Call]]:
    """Names a peer that reads packed keys."""

    def add(maker: Callable[[Problem], Call]) -> Callable[[Problem], Call]:
        PEERS[name] = lambda problem, block_size: maker(problem)
        return maker

    return add


def zyfa_name(variant: str, problem: Problem) -> str:
    shape = problem.shape
    phase = "causal" if shape.causal else "full"
    return f"zyfa/{kernel_name(KernelShape(shape.qk_dim, shape.v_dim, phase, VARIANTS[variant]))}"


def zyfa(variant: str, problem: Problem, block_size: int) -> Call:
    """The prefill kernel through a paged cache with shuffled blocks."""
    try:
        from zyfa_kernels.triton.prefill import prefill
        from zyfa_kernels.triton.rotate_quantize import rotate_quantize_q, rotate_quantize_write
    except ImportError as error:
        raise Unavailable(f"zyfa's Triton kernels do not load: {error}") from error
    from zyfa_backend.quantization import calibrate_scale

    config, shape = VARIANTS[variant], problem.shape
    form, rotation = config.qk_format, config.rotation
    q, q_scale = rotate_quantize_q(problem.q, rotation=rotation, qk_format=form)
    k_scale = calibrate_scale(problem.k, format=form, rotation=rotation)
    v_scale = calibrate_scale(problem.v)
    blocks = -(-shape.seq // block_size)
    table = torch.randperm(shape.batch * blocks, device=q.device, dtype=torch.int32).view(shape.batch, blocks)
    place = torch.arange(shape.seq, device=q.device)
    slots = (table[:, place // block_size].long() * block_size + place % block_size).flatten()
    k_cache = torch.zeros(table.numel(), block_size, *problem.k.shape[1:], dtype=torch.uint8, device=q.device)
    v_cache = torch.zeros(table.numel(), block_size, *problem.v.shape[1:], dtype=torch.uint8, device=q.device)
    rotate_quantize_write(
        problem.k, problem.v, k_cache, v_cache, slots, k_scale, v_scale, rotation=rotation, qk_format=form
    )
    if form == "int8":
        k_cache = k_cache.view(torch.int8)
    starts = _starts(problem)
    keys = torch.full((shape.batch,), shape.seq, dtype=torch.int32, device=q.device)
    out = torch.empty(q.shape[0], shape.q_heads, shape.v_dim, dtype=torch.bfloat16, device=q.device)

    def call() -> torch.Tensor:
        return prefill(
            q,
            q_scale,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            cu_seqlens_q=starts,
            seqlens_k=keys,
            block_table=table,
            max_seqlen_q=shape.seq,
            max_seqlen_k=shape.seq,
            softmax_scale=problem.softmax_scale,
            causal=shape.causal,
            p=config.probabilities,
            qk_format=form,
            offset=int(config.offset),
            delta=config.delta,
            out=out,
        )[0]

    return call


def _starts(problem: Problem) -> torch.Tensor:
    shape = problem.shape
    return torch.arange(0, shape.batch + 1, dtype=torch.int32, device=problem.q.device) * shape.seq


def _per_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3fn values of x and the fp32 scalar to multiply them with."""
    scale = x.abs().amax().float() / E4M3_MAX
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _fa3() -> Any:
    """FlashAttention's varlen call that knows version 3. Raises Unavailable."""
    if torch.version.hip or torch.cuda.get_device_capability()[0] != 9:
        raise Unavailable("FlashAttention 3 runs on Hopper only")
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise Unavailable(f"FlashAttention 3 is not installed (vllm.vllm_flash_attn): {error}") from error
    return flash_attn_varlen_func


def _fa3_call(problem: Problem, fp8: bool, block_size: int | None) -> Call:
    flash, shape = _fa3(), problem.shape
    q, k, v = problem.q, problem.k, problem.v
    extra: dict[str, Any] = {}
    if fp8:
        (q, q_scale), (k, k_scale), (v, v_scale) = map(_per_tensor, (q, k, v))
        heads = (shape.batch, shape.kv_heads)
        extra = {
            "q_descale": q_scale.expand(heads),
            "k_descale": k_scale.expand(heads),
            "v_descale": v_scale.expand(heads),
        }
    starts = _starts(problem)
    if block_size is None:
        extra["cu_seqlens_k"] = starts
    else:
        if shape.seq % block_size:
            raise Unavailable(f"the paged form is timed at multiples of {block_size} tokens")
        blocks = shape.seq // block_size
        table = torch.randperm(shape.batch * blocks, device=q.device, dtype=torch.int32)
        order = table.argsort()  # block b of the cache holds block order[b] of the tokens
        k, v = (_shuffled(x, block_size, order) for x in (k, v))
        extra["block_table"] = table.view(shape.batch, blocks)
        extra["seqused_k"] = torch.full((shape.batch,), shape.seq, dtype=torch.int32, device=q.device)
    out = torch.empty(q.shape[0], shape.q_heads, shape.v_dim, dtype=torch.bfloat16, device=q.device)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "max_seqlen_q": shape.seq,
        "cu_seqlens_q": starts,
        "max_seqlen_k": shape.seq,
        "softmax_scale": problem.softmax_scale,
        "causal": shape.causal,
        "fa_version": 3,
        "out": out,
        **extra,
    }
    return lambda: flash(**arguments)


def _shuffled(x: torch.Tensor, block_size: int, order: torch.Tensor) -> torch.Tensor:
    blocks = x.unflatten(0, (-1, block_size)).view(torch.uint8)  # no indexing of float8 on every torch
    return blocks[order].view(x.dtype)


peer("fa3-fp8")(lambda problem: _fa3_call(problem, True, None))
PEERS["fa3-fp8-paged"] = lambda problem, block_size: _fa3_call(problem, True, block_size)
peer("fa3-bf16")(lambda problem: _fa3_call(problem, False, None))


def _heads_first(x: torch.Tensor, batch: int) -> torch.Tensor:
    """[T, H, D] as [B, H, S, D], a view."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


@peer("sdpa-bf16")
def sdpa(problem: Problem) -> Call:
    """torch's scaled_dot_product_attention, with the backend that torch chooses."""
    q, k, v = (_heads_first(x, problem.shape.batch) for x in (problem.q, problem.k, problem.v))
    grouped = problem.shape.q_heads != problem.shape.kv_heads

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=problem.shape.causal, scale=problem.softmax_scale, enable_gqa=grouped
        )

    return call


@peer("cudnn-fp8")
def cudnn_fp8(problem: Problem) -> Call:
    """cuDNN's FP8 attention, by nvidia-cudnn-frontend."""
    if torch.version.hip:
        raise Unavailable("cuDNN runs on NVIDIA only")
    try:
        import cudnn
    except ImportError as error:
        raise Unavailable(f"nvidia-cudnn-frontend is not installed: {error}") from error
    shape = problem.shape
    (q, q_scale), (k, k_scale), (v, v_scale) = map(_per_tensor, (problem.q, problem.k, problem.v))
    q, k, v = (_heads_first(x, shape.batch) for x in (q, k, v))
    # Before Blackwell the output is fp8 as well.
    kind = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 10 else torch.float8_e4m3fn
    out = torch.empty(q.shape[0], shape.seq, shape.q_heads, shape.v_dim, dtype=kind, device=q.device).transpose(1, 2)

    def scalar(value: torch.Tensor | float) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=q.device).reshape(1, 1, 1, 1)

    # P is computed in fp8 as well: P ≤ 1 is lifted to e4m3's range.
    # O is no larger than V; its scale is 1 over V's.
    o_scale = 1.0 if kind == torch.bfloat16 else 1 / v_scale
    scales = [scalar(x) for x in (q_scale, k_scale, v_scale, 1 / 256, 256.0, o_scale)]
    amax = [scalar(0.0), scalar(0.0)]
    float32 = cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=float32,
        compute_data_type=float32,
        handle=handle,
    )

    def tensor(x: torch.Tensor, type_: Any) -> Any:
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=type_)

    inputs = [tensor(x, cudnn.data_type.FP8_E4M3) for x in (q, k, v)] + [tensor(x, float32) for x in scales]
    names = ("q", "k", "v", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    try:
        result, _, amax_s, amax_o = graph.sdpa_fp8(
            **dict(zip(names, inputs, strict=True)),
            is_inference=True,
            attn_scale=problem.softmax_scale,
            use_causal_mask=shape.causal,
        )
        result.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
        result.set_data_type(cudnn.data_type.FP8_E4M3 if kind == torch.float8_e4m3fn else cudnn.data_type.BFLOAT16)
        for one in (amax_s, amax_o):
            one.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(float32)
        graph.build([cudnn.heur_mode.A])
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
        raise Unavailable(f"cuDNN refuses the shape: {str(error).strip()[:200]}") from error
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
    pack = dict(zip([*inputs, result, amax_s, amax_o], [q, k, v, *scales, out, *amax], strict=True))

    def call() -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)  # another one during capture
        graph.execute(pack, workspace, handle=handle)
        return out

    return call


def _aiter(name: str) -> Any:
    if not torch.version.hip:
        raise Unavailable("AITER runs on ROCm only")
    try:
        import aiter
    except ImportError as error:
        raise Unavailable(f"AITER is not installed: {error}") from error
    if not hasattr(aiter, name):
        raise Unavailable(f"this AITER has no {name}")
    return getattr(aiter, name)


@peer("aiter-bf16")
def aiter_bf16(problem: Problem) -> Call:
    function, shape, starts = _aiter("flash_attn_varlen_func"), problem.shape, _starts(problem)
    return lambda: function(
        problem.q,
        problem.k,
        problem.v,
        starts,
        starts,
        shape.seq,
        shape.seq,
        softmax_scale=problem.softmax_scale,
        causal=shape.causal,
    )


@peer("aiter-fp8")
def aiter_fp8(problem: Problem) -> Call:
    function, shape, starts = _aiter("flash_attn_varlen_fp8_pertensor_func"), problem.shape, _starts(problem)
    (q, q_scale), (k, k_scale), (v, v_scale) = map(_per_tensor, (problem.q, problem.k, problem.v))
    q_scale, k_scale, v_scale = (x.reshape(1) for x in (q_scale, k_scale, v_scale))
    return lambda: function(
        q,
        k,
        v,
        q_scale,
        k_scale,
        v_scale,
        starts,
        starts,
        shape.seq,
        shape.seq,
        softmax_scale=problem.softmax_scale,
        causal=shape.causal,
    )


def tokens_first(out: Any, problem: Problem) -> torch.Tensor:
    """A contender's output as [T, Hq, Dv]; one in fp8, of which V's scale is the unit, in bf16."""
    out = out[0] if isinstance(out, tuple | list) else out
    if out.dtype == torch.float8_e4m3fn:
        out = (out.float() * _per_tensor(problem.v)[1]).bfloat16()
    return out.transpose(1, 2).flatten(0, 1) if out.dim() == 4 else out


def select(text: str) -> list[str]:
    """Peers of a comma-separated list; "all" or "none". Raises BenchError."""
    from .errors import BenchError

    if text == "all":
        return list(PEERS)
    chosen = [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in PEERS]
    if unknown:
        raise BenchError(f"peers {', '.join(unknown)} are not known; choose from {', '.join(PEERS)}, all or none")
    return chosen
