"""Attention shapes of a benchmark, and Gaussian operands of one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
    """Operands: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], bf16 after RoPE on one device, T = batch · seq."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float

    def to(self, device: str) -> Problem:
        return replace(self, q=self.q.to(device), k=self.k.to(device), v=self.v.to(device))


def gaussian(shape: Shape, seed: int, device: str = "cuda") -> Problem:
    import torch

    make = torch.Generator(device).manual_seed(seed)
    tokens = shape.batch * shape.seq

    def normal(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(tokens, heads, dim, generator=make, device=device, dtype=torch.bfloat16)

    q, k = normal(shape.q_heads, shape.qk_dim), normal(shape.kv_heads, shape.qk_dim)
    return Problem(shape, q, k, normal(shape.kv_heads, shape.v_dim), 1 / math.sqrt(shape.qk_dim))


def at(shape: Shape, seq: int) -> Shape:
    return replace(shape, seq=seq)
