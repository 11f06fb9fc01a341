"""MLA's context chunks: attention to cached context, merged by vLLM with that of the new tokens.

vLLM's CPU platform turns chunked prefill and prefix caching off for MLA unless the processor has AMX, so that a server
without it never takes this path; the backend's methods are called as the engine calls them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from zyfa_backend import dispatch
from zyfa_backend.config import AttentionConfig, parse
from zyfa_backend.vllm.mla import ZyfaMLAPrefillBackend

HEADS, SCALE = 3, 192**-0.5
CONTEXT, NEW = (0, 130, 700), (65, 1, 200)


def backend(preset: str, monkeypatch) -> ZyfaMLAPrefillBackend:
    monkeypatch.setenv("ZYFA_CONFIG", preset)
    config = SimpleNamespace(
        additional_config={}, device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    return ZyfaMLAPrefillBackend(HEADS, SCALE, 512, 128, 64, 128, config)


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("preset", "bound"), [("unquantized", 0.004), ("lean", 0.09), ("exact", 0.09), ("int8", 0.05)])
def test_context_merges_to_the_whole(preset: str, bound: float, monkeypatch) -> None:
    """Three requests, one without context; relative error of the merged rows against fp64 on unquantised inputs."""
    torch.manual_seed(3)
    total = [c + n for c, n in zip(CONTEXT, NEW, strict=True)]
    q = torch.randn(sum(NEW), HEADS, 192).bfloat16()
    k = torch.randn(sum(total), HEADS, 192).bfloat16()
    v = torch.randn(sum(total), HEADS, 128).bfloat16()
    ends, starts = offsets(total).tolist()[1:], offsets(total).tolist()[:-1]
    context = torch.cat([torch.arange(s, e - n) for s, e, n in zip(starts, ends, NEW, strict=True)])
    new = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, NEW, strict=True)])

    ours = backend(preset, monkeypatch)
    ours.prepare_metadata(SimpleNamespace(query_start_loc=offsets(NEW), max_query_len=max(NEW)))
    before = dispatch.counters.snapshot()["kernels"]
    suffix, suffix_lse = ours.run_prefill_new_tokens(q, k[new], v[new], return_softmax_lse=True)
    chunk = SimpleNamespace(
        query_start_loc=offsets(NEW), max_query_len=max(NEW), cu_seq_lens=offsets(CONTEXT), max_seq_len=max(CONTEXT)
    )
    prefix, prefix_lse = ours.run_prefill_context_chunk(chunk, q, k[context], v[context])
    after = dispatch.counters.snapshot()["kernels"]
    stem = dispatch.kernel_name(dispatch.Shape(192, 128, "full", parse(preset)))
    assert after[f"torch/{stem}"]["tokens"] - before.get(f"torch/{stem}", {"tokens": 0})["tokens"] == sum(NEW)
    assert prefix_lse.shape == (HEADS, sum(NEW)) and bool((prefix_lse[:, : NEW[0]] == -torch.inf).all())

    merged = torch.empty_like(suffix)
    merge_attn_states(merged, prefix, prefix_lse, suffix, suffix_lse)
    begin = 0
    for start, end, count in zip(starts, ends, NEW, strict=True):
        expected = reference_rows(q[begin : begin + count], k[start:end], v[start:end])
        error = (merged[begin : begin + count].double() - expected).norm() / expected.norm()
        assert error <= bound, (preset, start, float(error))
        begin += count


def reference_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """fp64 attention of the last queries of a sequence, written out."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.double())


def test_numerics_follow_the_switches(monkeypatch) -> None:
    """ZYFA_CONFIG first; else lean where an FP8 cache was asked for, on a CPU handed over by name; else none."""
    from zyfa_backend.vllm.mla import mla_config_for
    from zyfa_backend.vllm.selection import MLA_CONFIG

    def asked(cache: str, additional: dict) -> AttentionConfig:
        cache_config = SimpleNamespace(cache_dtype=cache)
        return mla_config_for(SimpleNamespace(additional_config=additional, cache_config=cache_config))

    monkeypatch.delenv("ZYFA_CONFIG", raising=False)
    assert asked("auto", {}) == parse("unquantized")
    assert asked("fp8", {}) == parse("lean")
    assert asked("auto", {MLA_CONFIG: "lean"}) == parse("lean")
    monkeypatch.setenv("ZYFA_CONFIG", "exact")
    assert asked("auto", {}) == asked("fp8", {}) == parse("exact")
