"""Attention shapes of a benchmark, and the operands of one: Gaussian or captured."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import presets
from .errors import BenchError

if TYPE_CHECKING:
    import torch

DIMS = {"hd64": (64, 64), "hd128": (128, 128), "mla": (192, 128)}
HEADS = {"hd64": (32, 32), "hd128": (32, 32), "mla": (16, 16)}
MOST_HEADS, LONGEST = 1024, 1 << 20


@dataclass(frozen=True)
class Shape:
    """`batch` sequences of `seq` queries and as many keys. name: what the head dimensions are called."""

    name: str
    q_heads: int
    kv_heads: int
    seq: int = 0
    batch: int = 1
    causal: bool = True
    label: str = ""

    @property
    def qk_dim(self) -> int:
        return DIMS[self.name][0]

    @property
    def v_dim(self) -> int:
        return DIMS[self.name][1]

    @property
    def flops(self) -> float:
        """Of both products; a causal mask counts half of the square, as is usual."""
        pairs = self.batch * self.seq**2 / (2 if self.causal else 1)
        return 2 * (self.qk_dim + self.v_dim) * self.q_heads * pairs

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        of = f"{self.label} " if self.label else ""
        return f"{of}{self.name} {self.q_heads}/{self.kv_heads} {self.batch}x{self.seq} {mask}"


def parse(text: str, causal: bool, batch: int) -> Shape:
    """`hd128`, `hd128:32/8`, or the name of a model preset. Raises BenchError."""
    name, _, heads = text.partition(":")
    if name not in DIMS:
        known = presets.names()
        if name not in known or heads:
            raise BenchError(
                f"shape {text!r} is not accepted; give {', '.join(DIMS)}, with heads as in hd128:32/8, or a model: "
                f"{', '.join(known)}"
            )
        facts = presets.load(name).attention
        return Shape(facts["shape"], facts["q_heads"], facts["kv_heads"], 0, batch, causal, name)
    q_heads, kv_heads = HEADS[name]
    if heads:
        found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", heads)
        if not found:
            raise BenchError(f"heads {heads!r} of shape {text!r} are not accepted; the form is QUERY/KV, as in 32/8")
        q_heads, kv_heads = int(found[1]), int(found[2])
    if not 1 <= kv_heads <= q_heads <= MOST_HEADS or q_heads % kv_heads:
        raise BenchError(
            f"heads {q_heads}/{kv_heads} are not accepted; query heads are a multiple of the KV heads, "
            f"1 to {MOST_HEADS}"
        )
    return Shape(name, q_heads, kv_heads, 0, batch, causal)


@dataclass(frozen=True)
class Problem:
    """Operands on the GPU: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], bf16 after RoPE, T = batch · seq."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float


def gaussian(shape: Shape, seed: int, device: str = "cuda") -> Problem:
    import torch

    make = torch.Generator(device).manual_seed(seed)
    tokens = shape.batch * shape.seq

    def normal(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(tokens, heads, dim, generator=make, device=device, dtype=torch.bfloat16)

    q, k = normal(shape.q_heads, shape.qk_dim), normal(shape.kv_heads, shape.qk_dim)
    return Problem(shape, q, k, normal(shape.kv_heads, shape.v_dim), 1 / math.sqrt(shape.qk_dim))


def captured(path: Path, causal: bool, layers: list[int] | None, device: str = "cuda") -> list[Problem]:
    """The layers of an .npz that `zyfa capture` wrote, the chosen ones or all. Raises BenchError."""
    import torch

    try:
        with np.load(path) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise BenchError(f"--input {str(path)!r} is not readable as .npz: {error}") from None
    there = sorted({int(found[1]) for key in arrays if (found := re.fullmatch(r"layer(\d+)\.q", key))})
    if not there:
        raise BenchError(f"--input {str(path)!r} holds no layerN.q; give a file that `zyfa capture` wrote")
    missing = [layer for layer in layers or [] if layer not in there]
    if missing:
        raise BenchError(f"--layers {missing} are not in {str(path)!r}; it holds {', '.join(map(str, there))}")
    problems = []
    for layer in layers or there:
        try:
            q, k, v = (torch.from_numpy(np.asarray(arrays[f"layer{layer}.{n}"], np.float32)) for n in "qkv")
            scale = float(arrays.get(f"layer{layer}.softmax_scale", q.shape[-1] ** -0.5))
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(f"layer {layer} of {str(path)!r} is not usable: {error}") from None
        dims = next((name for name, pair in DIMS.items() if pair == (q.shape[-1], v.shape[-1])), None)
        if q.dim() != 3 or k.shape[:2] != v.shape[:2] or k.shape[0] != q.shape[0] or dims is None:
            raise BenchError(
                f"layer {layer} of {str(path)!r} has q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; "
                f"expected [tokens, heads, D] with D of {', '.join(DIMS)}"
            )
        shape = Shape(dims, q.shape[1], k.shape[1], q.shape[0], 1, causal, f"{path.stem} layer {layer}")
        q, k, v = (x.to(device, torch.bfloat16) for x in (q, k, v))
        problems.append(Problem(shape, q, k, v, scale))
    return problems


def at(shape: Shape, seq: int) -> Shape:
    return replace(shape, seq=seq)
