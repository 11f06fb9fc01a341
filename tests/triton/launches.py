"""Every kernel in each of its forms, once, on small data: what test_sanitizers.py runs under compute-sanitizer.

`python -m tests.triton.launches cuda`, or `cpu` under Triton's interpreter, on fewer queries. Prints the name of each
before it runs, for a report to be told apart by, and checks that its result is finite.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from zyfa_kernels.triton.head_scales import head_scales
from zyfa_kernels.triton.rotate_quantize import (
    rotate_quantize_packed,
    rotate_quantize_q,
    rotate_quantize_qkv,
    rotate_quantize_write,
)

from tests.attention_cases import rows
from tests.triton.decoding import last_tokens, run_decode
from tests.triton.problems import Batch, batch, run, with_config

# Two consumers and three stages of the Hopper kernel; contexts before the queries, which are transposed with them.
QUERIES = {"cuda": [(70, 300), (5, 5)], "cpu": [(3, 140), (2, 2)]}
PREFILLS = {
    "prefill lean 64": dict(dim=64),
    "prefill lean 128": dict(dim=128),
    "prefill lean 192": dict(dim=192),
    "prefill exact": dict(dim=128, block=64, probabilities="exact"),
    "prefill int8": dict(dim=128, block=32, qk_format="int8"),
    "prefill int8 192 packed": dict(dim=192, block=None, qk_format="int8"),
    "prefill packed": dict(dim=128, block=None),
    "prefill window": dict(dim=64, block=128, window=90),
    "prefill without a mask": dict(dim=64, causal=False),
    "prefill K beside V": dict(dim=128, layout="kv"),
    "prefill fp8 out": dict(dim=64, fp8_out=True),
    "prefill without keys": dict(dim=64, block=None, qk_format="int8", keyless=True),
}
DECODES = {
    "decode lean": dict(dim=128),
    "decode int8 192 window": dict(dim=192, block=32, window=280, qk_format="int8"),
    "decode exact": dict(dim=64, block=1, probabilities="exact"),
}


def prefill(device: str, dim: int, fp8_out: bool = False, keyless: bool = False, **options) -> torch.Tensor:
    """keyless: the last sequence has no keys."""
    config = {name: options.pop(name) for name in ("probabilities", "qk_format") if name in options}
    b = batch(QUERIES[device], 4, 2, dim, with_config(**config))
    if keyless:
        none = slice(0, 0)
        b = Batch(b.q, [b.k[0], rows(b.k[1], none)], [b.v[0], rows(b.v[1], none)], b.config)
    if fp8_out:
        out = torch.empty(sum(b.queries), 4, dim, dtype=torch.float8_e4m3fn, device=device)
        options |= {"out": out, "out_scale": torch.full((1,), 0.01, device=device)}
    return run(b, device=device, **options)[0]


def decode(device: str, dim: int, **options) -> torch.Tensor:
    config = {name: options.pop(name) for name in ("probabilities", "qk_format") if name in options}
    return run_decode(last_tokens([300, 5], 4, 2, dim, with_config(**config)), device=device, **options)[0]


def rotate_quantize(device: str, dim: int, qk_format: str = "fp8_e4m3", method: str | None = None) -> torch.Tensor:
    """Q alone, K and V into a cache, and all three at once; the scales of Q."""
    tokens, v_dim = 37, min(dim, 128)
    make = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, 4 * dim + 2 * (dim + v_dim), generator=make).to(torch.bfloat16).to(device)
    q, k, v = qkv.split([4 * dim, 2 * dim, 2 * v_dim], 1)
    caches = [torch.zeros(3, 16, 2, n, dtype=torch.uint8, device=device) for n in (dim, v_dim)]
    one, counts = torch.ones(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    slots = torch.arange(tokens, device=device) - 1
    choices = {"qk_format": qk_format, "method": method}
    _, scale = rotate_quantize_q(q.unflatten(1, (4, dim)), **choices)
    k, v = k.unflatten(1, (2, dim)), v.unflatten(1, (2, v_dim))
    rotate_quantize_write(k, v, *caches, slots, one, one, saturated=counts, **choices)
    _, fused = rotate_quantize_qkv(qkv, 4, 2, dim, *caches, slots, one, one, v_head_dim=v_dim, **choices)
    return torch.cat([scale, fused]).cpu()


def packed(device: str, qk_format: str) -> torch.Tensor:
    """What MLA's prefill quantises, V beside K's channels without a position; its scales."""
    make = torch.Generator().manual_seed(0)
    q, k, kv = (torch.randn(n, 2, d, generator=make).half().to(device) for n, d in ((5, 192), (150, 192), (150, 256)))
    scales = head_scales(k, kv[..., 128:], qk_format=qk_format)
    _, q_scale, _, _ = rotate_quantize_packed(q, k, kv[..., 128:], *scales, qk_format=qk_format)
    return torch.cat([q_scale.flatten(), *scales]).cpu()


def launches(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    found = {name: partial(prefill, device, **options) for name, options in PREFILLS.items()}
    found |= {name: partial(decode, device, **options) for name, options in DECODES.items()}
    found["rotate_quantize 128"] = partial(rotate_quantize, device, 128)
    found["rotate_quantize int8 192"] = partial(rotate_quantize, device, 192, "int8")
    found["rotate_quantize butterfly"] = partial(rotate_quantize, device, 64, method="butterfly")
    found |= {f"packed {form}": partial(packed, device, form) for form in ("fp8_e4m3", "int8")}
    return found


if __name__ == "__main__":
    where = sys.argv[1]
    for title, launch in launches(where).items():
        print(title, flush=True)
        assert bool(torch.isfinite(launch().float()).all()), title
    print("done", flush=True)
