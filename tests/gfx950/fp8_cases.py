"""Runs of the fp8 kernels on the emulator, for tests: packed sequences, any strides, delayed memory."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from zyfa_kernels.emulator import CodeObject, Emulator
from zyfa_kernels.runtime.attention import Array, Pages, attention_launch
from zyfa_kernels.runtime.cache import code_object
from zyfa_kernels.runtime.registry import kernel

from zyfa_backend import kernel_run, reference


@cache
def loaded(which: str) -> CodeObject:
    return CodeObject.load(code_object(which))


def name(causal: bool, lean: bool) -> str:
    return f"fp8-hd128-{'causal' if causal else 'full'}-{'lean' if lean else 'exact'}"


def launch(
    problems: list[kernel_run.Problem],
    *,
    pad_heads: int = 0,
    want_lse: bool = True,
    delayed: bool = False,
    window: int | None = None,
    page: int | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """One launch over packed sequences; with pad_heads the arrays have that many unused heads between tokens.

    page: K and V in pages of that many tokens, shuffled, K and V of a page side by side, strangers' pages between.

    K and V scales are those of the first problem, as in an engine's cache. Unused elements are NaN codes.
    """
    first = problems[0]
    lean = first.config.probabilities == "lean"
    which = name(first.causal, lean)
    emulator = Emulator(loaded(which), delayed_memory=delayed)
    memory = emulator.memory
    hq, hkv = first.q.data.shape[1], first.k.data.shape[1]
    q_lens, k_lens = [len(p.q.data) for p in problems], [len(p.k.data) for p in problems]

    def packed(tensors: list[torch.Tensor]) -> Array:
        data = torch.cat(tensors).contiguous().numpy()
        if not len(data):
            return Array(memory.upload(np.full(16, 0x7F, np.uint8)), 128 * (data.shape[1] + pad_heads), 128)
        filler = np.full((len(data), pad_heads, 128), 0x7F, np.uint8)
        data = np.concatenate([data, filler], 1)
        return Array(memory.upload(data), data.shape[1] * 128, 128)

    def bounds(lengths: list[int]) -> int:
        return memory.upload(np.cumsum([0, *lengths]).astype(np.int32))

    def paged() -> tuple[Array, Array, Pages]:
        rng = np.random.default_rng(9)
        counts = [-(-n // page) for n in k_lens]
        total = sum(counts) + 3
        cache = np.full((total, 2, page, hkv, 128), 0x7F, np.uint8)
        free = rng.permutation(total).tolist()
        table = np.full((len(problems), max(max(counts), 1)), 10**6, np.int32)  # unused entries lead nowhere
        for row, (p, count) in enumerate(zip(problems, counts, strict=True)):
            for n in range(count):
                table[row, n] = free.pop()
                for which, x in enumerate((p.k, p.v)):
                    piece = x.data[n * page : (n + 1) * page].numpy()
                    cache[table[row, n], which, : len(piece)] = piece
        start, size = memory.upload(cache), page * hkv * 128
        pages = Pages(memory.upload(table), table.shape[1] * 4, page, 2 * size, 2 * size)
        return Array(start, hkv * 128, 128), Array(start + size, hkv * 128, 128), pages

    if page:
        k, v, pages = paged()
    else:
        k, v, pages = packed([p.k.data for p in problems]), packed([p.v.data for p in problems]), None
    tq = sum(q_lens)
    out = memory.upload(np.full((tq, hq + pad_heads, 128), 0x7FC0, np.uint16))
    lse = memory.alloc(4 * hq * tq) if want_lse else 0
    scale = torch.cat([p.q.scale for p in problems]).numpy()
    made = attention_launch(
        which,
        q=packed([p.q.data for p in problems]),
        k=k,
        v=v,
        pages=pages,
        window=window,
        out=Array(out, (hq + pad_heads) * 256, 256),
        lse=lse,
        lse_head=4 * tq,
        q_scale=Array(memory.upload(scale), 4 * hq, 4),
        k_scale=memory.upload(first.k.scale.numpy()),
        v_scale=memory.upload(first.v.scale.numpy()),
        scale_per_head=True,
        cu_seqlens_q=bounds(q_lens),
        cu_seqlens_k=bounds(k_lens),
        batch=len(problems),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(k_lens),
        q_heads=hq,
        kv_heads=hkv,
        softmax_scale=first.softmax_scale,
        delta=first.config.delta,
    )
    assert made.symbol == kernel(which).symbol
    emulator.launch(made.symbol, made.grid, made.block, made.kernarg)
    bits = memory.download(out, np.int16, (tq, hq + pad_heads, 128))
    assert (bits[:, hq:] == 0x7FC0).all(), "heads that are not ours were written"
    result = torch.from_numpy(bits[:, :hq].copy()).view(torch.bfloat16)
    sums = torch.from_numpy(memory.download(lse, np.float32, (hq, tq))) if want_lse else None
    pieces, at = [], 0
    for n in q_lens:
        pieces.append((result[at : at + n], None if sums is None else sums[:, at : at + n]))
        at += n
    return pieces


def expected(p: kernel_run.Problem, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.attend(
        p.q,
        p.k,
        p.v,
        softmax_scale=p.softmax_scale,
        causal=p.causal,
        window=window,
        config=p.config,
        out_dtype=torch.bfloat16,
    )


def gaussian(seq: int, hq: int = 1, hkv: int = 1, context: int = 0, *, causal=True, lean=True, kind="gaussian", seed=0):
    return kernel_run.generate(kind, seq, hq, hkv, context, causal, lean, seed)
