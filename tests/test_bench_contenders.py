"""The peer that reads a paged cache, with FlashAttention's call replaced by one for the CPU."""

from __future__ import annotations

import pytest
import torch

from zyfa_backend.bench import contenders, kernels, shapes
from zyfa_backend.bench.clocks import Sampler

SHAPE = shapes.at(shapes.parse("hd64:4/2", False, 2), 256)


def flash_over_pages(pages):
    """Attention written out in fp32 over the pages that a block table names; notes each page's shape."""

    def flash(q, k, v, *, block_table, seqused_k, q_descale, k_descale, v_descale, softmax_scale, causal, **_):
        pages.append(tuple(k.shape))
        assert not causal and seqused_k.tolist() == [256, 256]
        outputs = []
        for i, table in enumerate(block_table.long()):
            keys, values = (x.float()[table].flatten(0, 1).repeat_interleave(2, 1) for x in (k, v))
            queries = q[256 * i : 256 * (i + 1)].float()
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * (q_descale * k_descale)[i, 0] * softmax_scale
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values) * v_descale[i, 0])
        return torch.cat(outputs).bfloat16()

    return flash


@pytest.mark.parametrize("block_size", [16, 128])
def test_the_paged_peer_has_the_chosen_block_size(block_size, monkeypatch):
    pages: list[tuple[int, ...]] = []
    monkeypatch.setattr(contenders, "_fa3", lambda: flash_over_pages(pages))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    report = kernels.Report(Sampler(), print)
    settings = kernels.Settings((), ("fa3-fp8-paged", "sdpa-bf16"), block_size)
    found, differences = kernels.calls(shapes.gaussian(SHAPE, 0, "cpu"), settings, report)
    assert list(found) == ["fa3-fp8-paged", "sdpa-bf16"] and not report.skipped
    assert pages == [(512 // block_size, block_size, 2, 64)]
    assert 0 < differences["fa3-fp8-paged"] < 0.1 and differences["sdpa-bf16"] == 0


def test_a_length_that_is_no_multiple_of_the_block_names_it(monkeypatch):
    monkeypatch.setattr(contenders, "_fa3", lambda: flash_over_pages([]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    report = kernels.Report(Sampler(), print)
    problem = shapes.gaussian(shapes.at(SHAPE, 192), 0, "cpu")
    found, _ = kernels.calls(problem, kernels.Settings((), ("fa3-fp8-paged",), 128), report)
    assert not found and report.skipped[0]["reason"] == "the paged form is timed at multiples of 128 tokens"
