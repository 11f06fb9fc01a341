"""Launches of a gfx950 kernel on a batch of quantised sequences, on the emulator or an AMD GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from zyfa_backend.kernel_run import Problem

NAN_CODE = 0x7F  # of e4m3; stands wherever a kernel has no business
NAN_BF16 = 0x7FC0
SPARE_PAGES = 3
NO_PAGE = 10**6  # an entry of the block table that leads outside of the cache


class Device(Protocol):
    """Memory and launches. Addresses are integers."""

    def upload(self, array: np.ndarray) -> int: ...

    def alloc(self, nbytes: int) -> int: ...

    def download(self, address: int, dtype: type, shape: tuple[int, ...]) -> np.ndarray: ...

    def run(self, launch: Any) -> int:
        """Launch, wait, and return the wave-instructions executed, 0 where they are not counted."""
        ...


@cache
def loaded(name: str) -> Any:
    """The linked code object of a kernel, decoded."""
    from zyfa_kernels.emulator import CodeObject
    from zyfa_kernels.runtime.cache import code_object

    return CodeObject.load(code_object(name))


class EmulatorDevice:
    """A fresh emulator for a code object; delayed: what is loaded is poisoned until it is waited for."""

    def __init__(self, code: Any, delayed: bool = False, **options: Any) -> None:
        from zyfa_kernels.emulator import Emulator

        self.emulator = Emulator(code, delayed_memory=delayed, **options)
        memory = self.emulator.memory
        self.upload, self.alloc, self.download = memory.upload, memory.alloc, memory.download

    def run(self, launch: Any) -> int:
        self.emulator.launch(launch.symbol, launch.grid, launch.block, launch.kernarg)
        return self.emulator.stats.instructions


class GpuDevice:
    """The current AMD GPU. Memory is freed with the object."""

    def __init__(self) -> None:
        self._buffers: dict[int, Any] = {}

    def alloc(self, nbytes: int) -> int:
        from zyfa_kernels.runtime import hip

        buffer = hip.Buffer(nbytes)
        self._buffers[buffer.address] = buffer
        return buffer.address

    def upload(self, array: np.ndarray) -> int:
        data = np.ascontiguousarray(array).tobytes()
        address = self.alloc(len(data))
        self._buffers[address].write(data)
        return address

    def download(self, address: int, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        return np.frombuffer(bytearray(self._buffers[address].read()), dtype=dtype).reshape(shape)

    def run(self, launch: Any) -> int:
        from zyfa_kernels.runtime import hip

        hip.run(launch)
        hip.synchronize()
        return 0


def launch(
    device: Device,
    name: str,
    problems: Sequence[Problem],
    *,
    page: int | None = None,
    pad_heads: int = 0,
    want_lse: bool = True,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], int]:
    """One launch of kernel `name` over a batch of sequences.

    The scales of K and V, softmax_scale and window are those of the first problem, as in an engine's cache.
    page: K and V lie in pages of that many tokens, shuffled, K and V of a page side by side, strangers' pages between;
    None: packed one behind the other. pad_heads: unused heads between the tokens. What no sequence owns is NaN.
    Returns ((out bf16 [Tq, Hq, 128], lse fp32 [Hq, Tq] or None) of each sequence, wave-instructions executed).
    """
    from zyfa_kernels.runtime.attention import Array, attention_launch

    first = problems[0]
    (_, hq, dim), hkv = first.q.data.shape, first.k.data.shape[1]
    q_lens, k_lens = [len(p.q.data) for p in problems], [len(p.k.data) for p in problems]
    tokens = sum(q_lens)

    def packed(tensors: list[torch.Tensor]) -> Array:
        data = torch.cat(tensors).numpy()
        row = (data.shape[1] + pad_heads) * dim
        if not len(data):
            return Array(device.upload(np.full(16, NAN_CODE, np.uint8)), row, dim)
        filler = np.full((len(data), pad_heads, dim), NAN_CODE, np.uint8)
        return Array(device.upload(np.concatenate([data, filler], 1)), row, dim)

    def bounds(lengths: list[int]) -> int:
        return device.upload(np.cumsum([0, *lengths]).astype(np.int32))

    if page:
        k, v, pages = _paged(device, problems, page)
    else:
        k, v, pages = packed([p.k.data for p in problems]), packed([p.v.data for p in problems]), None
    out = device.upload(np.full((tokens, hq + pad_heads, dim), NAN_BF16, np.uint16))
    lse = device.alloc(4 * hq * tokens) if want_lse else 0
    made = attention_launch(
        name,
        q=packed([p.q.data for p in problems]),
        k=k,
        v=v,
        pages=pages,
        window=first.window,
        out=Array(out, (hq + pad_heads) * dim * 2, dim * 2),
        lse=lse,
        lse_head=4 * tokens,
        q_scale=Array(device.upload(torch.cat([p.q.scale for p in problems]).numpy()), 4 * hq, 4),
        k_scale=device.upload(first.k.scale.reshape(-1).numpy()),
        v_scale=device.upload(first.v.scale.reshape(-1).numpy()),
        scale_per_head=first.k.scale.numel() > 1,
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
    instructions = device.run(made)
    bits = device.download(out, np.uint16, (tokens, hq + pad_heads, dim))
    if (bits[:, hq:] != NAN_BF16).any():
        raise RuntimeError(f"{name} wrote to heads that are not its own")
    result = torch.from_numpy(bits[:, :hq].astype(np.int16)).view(torch.bfloat16)
    sums = torch.from_numpy(device.download(lse, np.float32, (hq, tokens))) if want_lse else None
    ends = np.cumsum(q_lens).tolist()
    spans = [slice(end - length, end) for end, length in zip(ends, q_lens, strict=True)]
    return [(result[span], None if sums is None else sums[:, span]) for span in spans], instructions


def _paged(device: Device, problems: Sequence[Problem], page: int) -> tuple[Any, Any, Any]:
    """K and V as arrays of pages [pages, 2, page, Hkv, 128], and where the pages of each sequence are."""
    from zyfa_kernels.runtime.attention import Array, Pages

    heads, dim = problems[0].k.data.shape[1:]
    counts = [-(-len(p.k.data) // page) for p in problems]
    total = sum(counts) + SPARE_PAGES
    store = np.full((total, 2, page, heads, dim), NAN_CODE, np.uint8)
    free = np.random.default_rng(9).permutation(total).tolist()
    table = np.full((len(problems), max(*counts, 1)), NO_PAGE, np.int32)
    for row, (problem, count) in enumerate(zip(problems, counts, strict=True)):
        for n in range(count):
            table[row, n] = free.pop()
            for which, x in enumerate((problem.k, problem.v)):
                piece = x.data[n * page : (n + 1) * page].numpy()
                store[table[row, n], which, : len(piece)] = piece
    start, size = device.upload(store), page * heads * dim
    pages = Pages(device.upload(table), table.shape[1] * 4, page, 2 * size, 2 * size)
    return Array(start, heads * dim, dim), Array(start + size, heads * dim, dim), pages
