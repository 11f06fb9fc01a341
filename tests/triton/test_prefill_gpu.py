"""`prefill` at sizes that only a GPU computes in time, and what only a GPU can show."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from zyfa_backend.oracle import relative_rms

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from zyfa_kernels.triton import prefill_call  # noqa: E402
from zyfa_kernels.triton.prefill import implementation, prefill  # noqa: E402

from tests.triton import specification  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


class Gaussian:
    """Paged sequences of Gaussian codes: (queries, keys) each, shuffled pages, scales that are nowhere 1."""

    def __init__(self, lengths, hq=2, hkv=1, d=128, block=16, qk_format="fp8_e4m3", peak=1.0, seed=0):
        make = torch.Generator(DEVICE).manual_seed(seed)
        dv, self.lengths, self.qk_format, self.block = min(d, 128), lengths, qk_format, block
        tokens, most = sum(q for q, _ in lengths), max(k for _, k in lengths)
        columns = -(-most // block)

        def normal(*shape, factor=1.0):
            return torch.randn(*shape, generator=make, device=DEVICE) * factor

        def codes(x):
            if qk_format == "int8":
                return (x * 36).round().clamp(-127, 127).to(torch.int8)
            return x.to(torch.float8_e4m3fn)

        self.q = codes(normal(tokens, hq, d))
        self.q_scale = (normal(tokens, hq).abs() * 0.2 + 0.9) * peak / (36**2 if qk_format == "int8" else 1)
        self.k = codes(normal(len(lengths) * columns, block, hkv, d))
        self.v = normal(len(lengths) * columns, block, hkv, dv).to(torch.float8_e4m3fn)
        self.k_scale, self.v_scale = (torch.rand(hkv, generator=make, device=DEVICE) + 0.5 for _ in range(2))
        order = torch.randperm(len(lengths) * columns, generator=make, device=DEVICE)
        self.table = order.view(len(lengths), columns).to(torch.int32)

    def run(self, lengths=None, rows=None, table=None, **options):
        lengths = lengths or self.lengths
        rows = rows if rows is not None else slice(None)
        if "cu_seqlens_q" not in options:
            cu = torch.tensor([0, *(q for q, _ in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            options["cu_seqlens_q"] = cu.to(DEVICE)
            options["seqlens_k"] = torch.tensor([k for _, k in lengths], dtype=torch.int32, device=DEVICE)
        arguments = dict(
            block_table=self.table if table is None else table,
            max_seqlen_q=max(q for q, _ in lengths),
            max_seqlen_k=max(k for _, k in lengths),
            softmax_scale=self.q.shape[2] ** -0.5,
            qk_format=self.qk_format,
            lse=True,
        )
        q, q_scale = self.q[rows], self.q_scale[rows]
        return prefill(q, q_scale, self.k, self.v, self.k_scale, self.v_scale, **{**arguments, **options})

    def head(self, i, head, last):
        """fp64 operands of the last queries of sequence i, one head: q, k, v, c, position of the first."""
        start = sum(q for q, _ in self.lengths[:i])
        queries, keys = self.lengths[i]
        group = self.q.shape[1] // self.k.shape[2]
        pages = self.table[i].long()
        k, v = (x[pages, :, head // group].flatten(0, 1)[:keys].double() for x in (self.k, self.v))
        rows = slice(start + queries - last, start + queries)
        scale = self.k_scale[head // group].double() * self.q.shape[2] ** -0.5 / math.log(2)
        return self.q[rows, head].double(), k, v, self.q_scale[rows, head].double() * scale, keys - last

    def errors(self, i, head, last=256, **options):
        """Relative RMS error of the kernel and of the specification against plain softmax in fp64."""
        out, lse = self.run(
            **{"out": torch.empty(*self.q.shape[:2], self.v.shape[3], dtype=torch.float16, device=DEVICE)}
        )
        q, k, v, c, first = self.head(i, head, last)
        x = (q @ k.T) * c[:, None]
        x.masked_fill_(
            torch.arange(len(k), device=DEVICE)[None] > torch.arange(first, len(k), device=DEVICE)[:, None], -math.inf
        )
        exact = torch.softmax(x * math.log(2), -1) @ v
        ideal, ideal_lse = specification.attend(q, k, v, c, first, **options)
        stop = sum(n for n, _ in self.lengths[: i + 1])
        got = (
            out[stop - last : stop, head].double() / self.v_scale[head // (self.q.shape[1] // self.k.shape[2])].double()
        )
        return (
            relative_rms(got, exact),
            relative_rms(ideal, exact),
            float((lse[head, stop - last : stop] - ideal_lse).abs().max()),
        )


@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("qk_format", ["fp8_e4m3", "int8"])
def test_error_is_that_of_the_specification(d, qk_format):
    problem = Gaussian([(1000, 1000), (300, 4096), (4096, 4096)], 6, 2, d, qk_format=qk_format)
    for sequence, head in ((0, 0), (1, 3), (2, 5)):
        error, ideal, lse = problem.errors(sequence, head)
        assert error < 1.1 * ideal and lse < 0.02


def test_long_rows_are_no_worse_than_short_ones():
    """The tensor cores' short accumulator must not gather error over the keys: see the second-level accumulator."""
    ratios = {}
    for keys in (4096, 32768):
        error, ideal, _ = Gaussian([(512, keys)], 1, 1).errors(0, 0, 512)
        ratios[keys] = error / ideal
    assert ratios[32768] < 1.02 * ratios[4096] and ratios[32768] < 1.1


@pytest.mark.parametrize("d", [64, 128, 192])
def test_same_bits_chunked_and_whole(d):
    whole = Gaussian([(3000, 3000), (77, 2500)], 4, 2, d)
    out, lse = whole.run()
    for start, stop in ((0, 1), (1, 1100), (1100, 3000)):
        part, part_lse = whole.run([(stop - start, stop)], slice(start, stop), whole.table[:1])
        assert torch.equal(part, out[start:stop]) and torch.equal(part_lse, lse[:, start:stop])
    part, _ = whole.run([(77, 2500)], slice(3000, 3077), whole.table[1:].contiguous())
    assert torch.equal(part, out[3000:])


def test_runs_repeat_bit_for_bit():
    problem = Gaussian([(2048, 2048)] * 4, 8, 2)
    first = problem.run()[0]
    for _ in range(5):
        assert torch.equal(problem.run()[0], first)


def test_parts_of_a_long_batch(monkeypatch):
    """A workspace that holds one sequence at a time gives what a large one does."""
    import zyfa_kernels.triton.prefill as module

    problem = Gaussian([(200, 900)] * 5, 4, 2)
    out, lse = problem.run()
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 1)
    parts, parts_lse = problem.run()
    assert torch.equal(out, parts) and torch.equal(lse, parts_lse)


@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_sequences_without_keys_beside_others(d, window, causal, monkeypatch):
    """They give 0 and -inf and the others what they would, whatever the workspace held: here NaN codes."""

    def poisoned(*shape, **options):
        made = torch.empty(*shape, **options)
        made.view(torch.uint8).fill_(0x7F)
        return made

    lengths = [(300, 700), (200, 900), (5, 300), (1, 1), (129, 129)]
    problem = Gaussian(lengths, 4, 2, d)
    options = {"window": window, "causal": causal, "max_seqlen_k": 900}
    want, want_lse = problem.run(**options)
    monkeypatch.setattr(prefill_call, "torch", SimpleNamespace(**{**vars(torch), "empty": poisoned}))
    for empty in ([0], [0, 2, 3], [3, 4], [0, 1, 2, 3, 4]):
        kept = [(queries, 0 if i in empty else keys) for i, (queries, keys) in enumerate(lengths)]
        out, lse = problem.run(kept, **options)
        none = torch.cat([torch.full((n,), i in empty) for i, (n, _) in enumerate(lengths)]).to(DEVICE)
        assert not out[none].any() and bool((lse[:, none] == -math.inf).all())
        assert torch.equal(out[~none], want[~none]) and torch.equal(lse[:, ~none], want_lse[:, ~none])


def test_beyond_2_31_elements():
    """Pages that lie more than 2^31 elements into the cache."""
    problem = Gaussian([(500, 1500)], 8, 8)
    out, _ = problem.run()
    shift = (1 << 31) // (16 * 8 * 128) + 1000
    small_k, small_v = problem.k, problem.v
    for name, small in (("k", small_k), ("v", small_v)):
        large = torch.empty(shift + small.shape[0], *small.shape[1:], dtype=small.dtype, device=DEVICE)
        large[shift:] = small
        setattr(problem, name, large)
    far, _ = problem.run(table=problem.table + shift)
    assert torch.equal(out, far)


def test_nothing_waits_for_the_device():
    problem = Gaussian([(300, 700), (64, 64)], 4, 2)
    problem.run()
    torch.cuda.synchronize()
    lengths = [(300, 700), (64, 64)]
    tensors = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 300, 364], [700, 64])]
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(lengths, cu_seqlens_q=tensors[0], seqlens_k=tensors[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_graph():
    problem = Gaussian([(256, 512)], 4, 2)
    want, _ = problem.run()
    out = torch.zeros_like(want)
    cu, keys = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 256], [512]))

    def call():
        problem.run(cu_seqlens_q=cu, seqlens_k=keys, out=out)

    call()
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_hopper_runs_the_hopper_kernel():
    if torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    assert implementation(DEVICE).startswith("hopper")
