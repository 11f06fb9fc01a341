"""`decode` at sizes that only a GPU computes in time, and what only a GPU can show."""

from __future__ import annotations

import math

import pytest
import torch

from zyfa_backend.oracle import relative_rms

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from zyfa_kernels.triton import decode_call  # noqa: E402
from zyfa_kernels.triton.decode import decode  # noqa: E402
from zyfa_kernels.triton.prefill import prefill  # noqa: E402

from tests.triton import specification  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


class Gaussian:
    """Paged sequences of Gaussian codes with a query each: shuffled pages, scales that are nowhere 1."""

    def __init__(self, lengths, hq=8, hkv=2, d=128, block=16, qk_format="int8", seed=0):
        make = torch.Generator(DEVICE).manual_seed(seed)
        dv, self.lengths, self.qk_format = min(d, 128), lengths, qk_format
        columns = -(-max(lengths) // block)
        pages = len(lengths) * columns

        def normal(*shape):
            return torch.randn(*shape, generator=make, device=DEVICE)

        def codes(x):
            if qk_format == "int8":
                return (x * 36).round().clamp(-127, 127).to(torch.int8)
            return x.to(torch.float8_e4m3fn)

        self.q = codes(normal(len(lengths), hq, d))
        self.q_scale = (normal(len(lengths), hq).abs() * 0.2 + 0.9) / (36**2 if qk_format == "int8" else 1)
        self.k = codes(normal(pages, block, hkv, d))
        self.v = normal(pages, block, hkv, dv).to(torch.float8_e4m3fn)
        self.k_scale, self.v_scale = (torch.rand(hkv, generator=make, device=DEVICE) + 0.5 for _ in range(2))
        self.table = torch.randperm(pages, generator=make, device=DEVICE).view(-1, columns).to(torch.int32)
        self.keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def run(self, rows=slice(None), table=None, **options):
        arguments = dict(
            seqlens_k=self.keys[rows],
            block_table=(self.table if table is None else table)[rows],
            max_seqlen_k=max(self.lengths),
            softmax_scale=self.q.shape[2] ** -0.5,
            qk_format=self.qk_format,
            out_dtype=torch.float16,
        )
        operands = (self.q[rows], self.q_scale[rows], self.k, self.v, self.k_scale, self.v_scale)
        return decode(*operands, **{**arguments, **options})

    def prefill(self):
        out = torch.empty(*self.q.shape[:2], self.v.shape[3], dtype=torch.float16, device=DEVICE)
        operands = (self.q, self.q_scale, self.k, self.v, self.k_scale, self.v_scale)
        return prefill(
            *operands, cu_seqlens_q=torch.arange(len(self.lengths) + 1, dtype=torch.int32, device=DEVICE),
            seqlens_k=self.keys, block_table=self.table, max_seqlen_q=1, max_seqlen_k=max(self.lengths),
            softmax_scale=self.q.shape[2] ** -0.5, qk_format=self.qk_format, out=out, lse=True,
        )  # fmt: skip

    def errors(self, i, head):
        """Relative RMS error of the kernel and of the specification against fp64, and their difference in the LSE."""
        out, lse = self.run()
        kv_head = head // (self.q.shape[1] // self.k.shape[2])
        pages = self.table[i].long()
        k, v = (x[pages, :, kv_head].flatten(0, 1)[: self.lengths[i]].double() for x in (self.k, self.v))
        q = self.q[i : i + 1, head].double()
        scale = self.k_scale[kv_head].double() * self.q.shape[2] ** -0.5 / math.log(2)
        c = self.q_scale[i : i + 1, head].double() * scale
        exact = torch.softmax((q @ k.T) * c[:, None] * math.log(2), -1) @ v
        ideal, ideal_lse = specification.attend(q, k, v, c, len(k) - 1)
        got = out[i, head].double() / self.v_scale[kv_head].double()
        return relative_rms(got[None], exact), relative_rms(ideal, exact), float((lse[head, i] - ideal_lse[0]).abs())


@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("qk_format", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("block", [1, 16, 256])
def test_error_is_that_of_the_specification(d, qk_format, block):
    problem = Gaussian([1000, 300, 33000], 6, 2, d, block, qk_format)
    for sequence, head in ((0, 0), (1, 3), (2, 5)):
        error, ideal, lse = problem.errors(sequence, head)
        assert error < 1.1 * ideal + 1e-3 and lse < 1e-3


@pytest.mark.parametrize("p", ["lean", "exact"])
@pytest.mark.parametrize("qk_format", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("peak", [1, 3, 12])
def test_ones_give_exactly_one(p, qk_format, peak):
    """The sharper the peak, the more of the sum are small codes of P, e4m3's subnormals among them."""
    problem = Gaussian([700, 33000, 129, 1], 8, 2, qk_format=qk_format)
    problem.q_scale *= peak
    problem.v = torch.full_like(problem.v.float(), 2).to(torch.float8_e4m3fn)
    problem.v_scale.fill_(0.5)
    out, _ = problem.run(p=p)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("p", ["lean", "exact"])
@pytest.mark.parametrize("qk_format", ["fp8_e4m3", "int8"])
def test_each_run_has_the_same_bits(p, qk_format):
    problem = Gaussian([700, 33000, 129, 1], 8, 2, qk_format=qk_format)
    problem.q_scale *= 3
    out, lse = problem.run(p=p)
    for _ in range(8):
        again, again_lse = problem.run(p=p)
        assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_agrees_with_prefill_up_to_the_order_of_sums():
    """int8 scores are exact: all codes of P are prefill's, whose products have Hopper's short accumulator."""
    problem = Gaussian([5000, 64, 1, 32768], 7, 1)
    (out, lse), (want, want_lse) = problem.run(), problem.prefill()
    assert relative_rms(out.double(), want.double()) < 1e-3
    assert float((lse - want_lse).abs().max()) < 1e-3


def test_same_bits_whatever_the_batch_and_the_launch(monkeypatch):
    problem = Gaussian([3000, 77, 20000, 512])
    out, lse = problem.run()
    for i in range(4):
        alone, alone_lse = problem.run(slice(i, i + 1), max_seqlen_k=problem.table.shape[1] * 16)
        assert torch.equal(alone, out[i : i + 1]) and torch.equal(alone_lse, lse[:, i : i + 1])
    for _ in range(5):
        assert torch.equal(problem.run()[0], out)
    for name in ("PROGRAMS", "WORKSPACE_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(decode_call, name, 1)
            assert torch.equal(problem.run()[0], out)


def test_beyond_2_31_elements():
    problem = Gaussian([1500, 20], 8, 8, qk_format="fp8_e4m3")
    out, _ = problem.run()
    shift = (1 << 31) // (16 * 8 * 128) + 1000
    for name in ("k", "v"):
        small = getattr(problem, name)
        large = torch.empty(shift + small.shape[0], *small.shape[1:], dtype=small.dtype, device=DEVICE)
        large[shift:] = small
        setattr(problem, name, large)
    far, _ = problem.run(table=problem.table + shift)
    assert torch.equal(out, far)


def test_nothing_waits_for_the_device():
    problem = Gaussian([700, 64])
    problem.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window", [None, 500])
def test_a_captured_graph_serves_other_lengths(window):
    """Captured with every length 1 and the longest maximum, as an engine does; replayed with rows of padding, too."""
    problem = Gaussian([4000, 1000, 300, 64, 1], 8, 2)
    lengths, table = torch.ones_like(problem.keys), torch.zeros_like(problem.table)
    out = torch.full((5, problem.q.shape[1], 128), torch.nan, dtype=torch.float16, device=DEVICE)
    kept = {}

    def call():
        kept["lse"] = problem.run(table=table, seqlens_k=lengths, max_seqlen_k=4000, window=window, out=out)[1]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    table.copy_(problem.table)
    for replayed in ([4000, 1000, 300, 64, 1], [17, 0, 4000, 257, 0], [0] * 5):
        lengths.copy_(torch.tensor(replayed, dtype=torch.int32))
        graph.replay()
        want, want_lse = problem.run(seqlens_k=lengths.clone(), window=window)
        assert torch.equal(out, want) and torch.equal(kept["lse"], want_lse)
        empty = lengths == 0
        assert not out[empty].any() and bool((kept["lse"][:, empty] == -math.inf).all())
