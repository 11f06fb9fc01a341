"""Runs AITER's gfx950 attention kernels, which nobody here wrote, on the emulator.

The objects are not part of this project: ZYFA_AITER_HSA names a folder that holds `fmha_v3_fwd/` and `fmha_v4_fwd/` of
AITER's `hsa/gfx950`. The argument block is AITER's `fmha_fwd_v3_args` (41 fields padded to 16 bytes, strides in bytes).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
from zyfa_kernels.emulator import CodeObject, Emulator

FIELDS = (
    "ptr_o ptr_q ptr_k ptr_v ptr_lse scalar s_seq_len s_Seqs s_Ts s_Hs s_Bs s_gqa s_k_Seqs s_k_Hs s_k_Bs s_opt s_lse "
    "s_kv_seq_len s_qk_head_dim s_v_head_dim s_q_head_num s_v_Seqs s_v_Hs s_v_Bs s_o_Seqs s_o_Hs s_o_Bs ptr_qseq "
    "ptr_kseq s_lse_Hs ptr_qseq_padding ptr_kseq_padding ptr_q_descale ptr_k_descale ptr_v_descale s_descale_q_Bs "
    "s_descale_q_Hs s_descale_k_Bs s_descale_k_Hs s_descale_v_Bs s_descale_v_Hs"
).split()


ROOT = os.environ.get("ZYFA_AITER_HSA", "")


def path(name: str) -> Path:
    """Path of the code object `name`, such as ``fmha_v3_fwd/fwd_hd128_fp8``."""
    return Path(ROOT) / f"{name}.co"


def kernarg(**values) -> bytes:
    """The 656-byte argument block; fields that are not given are 0."""
    unknown = set(values) - set(FIELDS)
    if unknown:
        raise ValueError(f"no such fields: {unknown}")
    parts = []
    for name in FIELDS:
        value = values.get(name, 0)
        kind = "<Q8x" if name.startswith("ptr") else "<f12x" if isinstance(value, float) else "<I12x"
        parts.append(struct.pack(kind, value))
    return b"".join(parts)


def attention(q, k, v, scale: float, causal: bool):
    """fp64 attention of q [S, H, D], k, v [T, Hkv, D]; returns out [S, H, Dv] and lse [H, S]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    scores = np.einsum("shd,thd->hst", q, k) * scale
    if causal:
        rows, columns = np.arange(q.shape[0])[:, None], np.arange(k.shape[0])
        scores = np.where(columns <= rows + k.shape[0] - q.shape[0], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("hst,thd->shd", weights / total, v), (np.log(total) + top)[..., 0]


def run(
    path,
    seq: int,
    *,
    causal: bool,
    kind: str,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 128,
    v_dim: int = 128,
    tile: int = 256,
    block: int = 512,
    version: int = 3,
    seed: int = 0,
    delayed: bool = False,
    lse: bool = True,
    **emulator_options,
):
    """Run one kernel on Gaussian inputs.

    kind: "bf16", "fp8", or "i8fp8" (int8 Q and K with scale 1/32, fp8 V). Returns a dict with the errors against
    fp64 on the same quantised inputs, the emulator's statistics, and the hazards it collected.
    """
    rng = np.random.default_rng(seed)
    kv_heads = kv_heads or heads
    q = rng.standard_normal((seq, heads, head_dim), np.float32)
    k = rng.standard_normal((seq, kv_heads, head_dim), np.float32)
    v = rng.standard_normal((seq, kv_heads, v_dim), np.float32)
    qk_scale = 1 / 32 if kind == "i8fp8" else 1.0
    if kind == "i8fp8":
        q, k = (np.clip(np.rint(x / qk_scale), -127, 127).astype(np.int8) for x in (q, k))
    else:
        q, k = (x.astype(ml_dtypes.bfloat16 if kind == "bf16" else ml_dtypes.float8_e4m3fn) for x in (q, k))
    v = v.astype(ml_dtypes.bfloat16 if kind == "bf16" else ml_dtypes.float8_e4m3fn)
    emulator = Emulator(CodeObject.load(path), delayed_memory=delayed, **emulator_options)
    memory, item = emulator.memory, q.itemsize
    out = memory.alloc(seq * heads * v_dim * 2)
    lse_at = memory.alloc(heads * seq * 4)
    one, qk_descale = memory.upload(np.ones(1, np.float32)), memory.upload(np.full(1, qk_scale, np.float32))
    scale = head_dim**-0.5
    # Above 16K tokens or for other head counts AITER's launcher lowers s_opt of causal kernels from 5 to 3.
    opt = 3 if causal and (heads % 8 or seq > 16384) else 5
    arguments = kernarg(
        ptr_o=out,
        ptr_q=memory.upload(q.view(np.uint8)),
        ptr_k=memory.upload(k.view(np.uint8)),
        ptr_v=memory.upload(v.view(np.uint8)),
        ptr_lse=lse_at if version == 3 else 0,
        scalar=scale,
        s_seq_len=seq,
        s_Seqs=heads * head_dim * item,
        s_Ts=tile * heads * head_dim * item,
        s_Hs=head_dim * item,
        s_Bs=seq * heads * head_dim * item,
        s_gqa=heads // kv_heads,
        s_k_Seqs=kv_heads * head_dim * item,
        s_k_Hs=head_dim * item,
        s_k_Bs=seq * kv_heads * head_dim * item,
        s_opt=opt,
        s_lse=int(lse and version == 3),
        s_kv_seq_len=seq,
        s_qk_head_dim=head_dim,
        s_v_head_dim=v_dim,
        s_q_head_num=heads,
        s_v_Seqs=kv_heads * v_dim * item,
        s_v_Hs=v_dim * item,
        s_v_Bs=seq * kv_heads * v_dim * item,
        s_o_Seqs=heads * v_dim * 2,
        s_o_Hs=v_dim * 2,
        s_o_Bs=seq * heads * v_dim * 2,
        s_lse_Hs=seq * 4,
        **({} if kind == "bf16" else {"ptr_q_descale": qk_descale, "ptr_k_descale": qk_descale, "ptr_v_descale": one}),
    )
    blocks = -(-seq // tile)
    grid = (-(-blocks // 2) if causal else blocks, heads, 1)
    # The bf16 objects end their block before the scales of the fp8 ones.
    emulator.launch(None, grid, block, arguments[: emulator.code.kernel().kernarg_bytes])
    got = memory.download(out, ml_dtypes.bfloat16, (seq, heads, v_dim)).astype(np.float64)
    want, want_lse = attention(q, k, v, scale * qk_scale**2, causal)
    result = {
        "rel_rms": float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean())),
        "max_abs": float(np.abs(got - want).max()),
        "instructions": emulator.stats.instructions,
        "seconds": emulator.stats.seconds,
        "per_second": emulator.stats.per_second,
        "hazards": emulator.hazards,
    }
    if lse and version == 3:
        got_lse = memory.download(lse_at, np.float32, (heads, seq))
        result["lse_max_abs"] = float(np.abs(got_lse - want_lse).max())
    return result
