"""The Triton kernels over SGLang's pools, against torch's reference over equal pools.

On a GPU as they are (`--device cuda`), otherwise under Triton's interpreter, where test_gpu_interpreted.py runs them.
"""

from __future__ import annotations

import os

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import zyfa_backend
from tests.sglang.rig import FP8, Rig, error
from tests.sglang.test_backend import scale_file
from tests.sglang.test_hybrid import pair
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.sglang import selection

pytest.importorskip("triton")

# P's codes may differ by one where a score lies at a tie.
BOUND = 0.006
# fp16, since the interpreter cuts fp32 to bf16 instead of rounding it.
SMALL = {"q_heads": 2, "kv_heads": 2, "dim": 64, "dtype": torch.float16, "context": 256}


@pytest.fixture(autouse=True)
def interpreted(device, monkeypatch) -> None:
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU or Triton's interpreter")
    zyfa_backend.counters.reset()
    # The reference's pool is written by indexing: SGLang's own kernel for it is compiled by nvcc.
    monkeypatch.setattr("sglang.srt.mem_cache.memory_pool.can_use_store_cache", lambda *_: False)


class Twins:
    """Two rigs of the same seed, one with the Triton kernels, one with the reference, fed alike."""

    def __init__(self, device: str, **arguments) -> None:
        torch.manual_seed(0)
        self.ours = Rig(device=device, kernels="triton", **SMALL, **arguments)
        torch.manual_seed(0)
        self.reference = Rig(device=device, kernels="torch", **SMALL, **arguments)

    def step(self, make, tensors, layer: int = 0, bound: float = BOUND, **arguments) -> torch.Tensor:
        """make: the batch of a rig. Compares the output; returns that of the Triton kernels."""
        outs = [rig.run(make(rig), *(x.clone() for x in tensors), layer, **arguments) for rig in self.rigs]
        assert error(outs[0], outs[1]) < bound
        return outs[0]

    @property
    def rigs(self) -> tuple[Rig, Rig]:
        return self.ours, self.reference

    def same_codes(self, row: int, length: int, layer: int = 0) -> None:
        """What both pools hold of a request: V alike, K but for a few ties of the rotated value."""
        (k, v), (k_want, v_want) = (
            [x.view(torch.uint8) for x in rig.bytes_of(row, length, layer)] for rig in self.rigs
        )
        assert torch.equal(v, v_want)
        assert (k != k_want).float().mean() < 1e-3


@pytest.mark.parametrize("page", [1, 16])
def test_ragged_batches_over_prefixes_then_decode(page, device, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    twins = Twins(device, page=page)
    rows, before, new = [2, 3, 4], [0, 70, 33], [65, 3, 1]
    tensors = twins.ours.tensors(sum(before))
    twins.step(lambda rig: rig.extend(rows[1:], [0, 0], before[1:]), tensors)
    tensors = twins.ours.tensors(sum(new), 1)
    kept = [x.clone() for x in tensors]
    batch = twins.ours.extend(rows, before, new)
    out = twins.ours.run(batch, *tensors)
    assert all(torch.equal(x, y) for x, y in zip(tensors, kept, strict=True)), "the caller's tensors changed"
    assert error(out, twins.reference.run(twins.reference.extend(rows, before, new), *kept)) < BOUND
    lengths = [a + b for a, b in zip(before, new, strict=True)]
    twins.step(lambda rig: rig.decode(rows, lengths), twins.ours.tensors(3, 2), bound=0.01)
    for row, length in zip(rows, lengths, strict=True):
        twins.same_codes(row, length + 1)
    kernels = zyfa_backend.counters.snapshot()["kernels"]
    assert kernels["triton/fp8-hd64-causal-lean"] == {"calls": 2, "tokens": sum(before) + sum(new)}
    assert kernels["triton/fp8-hd64-decode-lean"] == {"calls": 1, "tokens": 3}
    assert kernels["triton/rotate-quantize-hd64"] == {"calls": 3, "tokens": sum(before) + sum(new) + 3}


@pytest.mark.parametrize("page,window_layers", [(1, ()), (16, (1,))])
def test_sliding_windows(page, window_layers, device, tmp_path, monkeypatch) -> None:
    """Prompts longer than the window; layer 1 sees 40 keys before each query, also in a pool of its own."""
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2, layers=2)[0])
    twins = Twins(device, page=page, windows=(-1, 40), window_layers=window_layers)
    start = 0
    for count in (180, 20, 1):
        tensors = twins.ours.tensors(count, count)
        batches = {
            id(rig): rig.extend([2], [start], [count]) if count > 1 else rig.decode([2], [start]) for rig in twins.rigs
        }
        for layer in (0, 1):
            twins.step(lambda rig, batches=batches: batches[id(rig)], tensors, layer, bound=0.01)
        start += count
    for layer in (0, 1):
        twins.same_codes(2, start, layer)


def test_without_saving_nothing_is_written(device, tmp_path, monkeypatch) -> None:
    """Then the batch is packed side by side, and with pages of 16 saved it is not: the bits are the same."""
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    twins = Twins(device, page=16)
    rows = [2, 3]
    twins.step(lambda rig: rig.extend(rows, [0, 0], [40, 10]), twins.ours.tensors(50))
    before = [x.view(torch.uint8).clone() for x in twins.ours.pool.get_kv_buffer(0)]
    tensors = twins.ours.tensors(8, 1)
    unsaved = twins.step(lambda rig: rig.extend(rows, [40, 10], [5, 3]), tensors, save_kv_cache=False)
    pool = twins.ours.pool.get_kv_buffer(0)
    assert all(torch.equal(x.view(torch.uint8), y) for x, y in zip(pool, before, strict=True))
    saved = twins.step(lambda rig: rig.extend(rows, [40, 10], [5, 3]), tensors)
    assert torch.equal(unsaved, saved)
    one = [x[:2] for x in tensors]
    twins.step(lambda rig: rig.decode(rows, [45, 13]), one, bound=0.02, save_kv_cache=False)


@pytest.mark.parametrize("preset", ["exact", "lean-no-rotation", "int8"])
def test_weights_sum_to_one(preset, device, monkeypatch) -> None:
    monkeypatch.setenv("ZYFA_CONFIG", preset)
    rig = Rig(device=device, kernels="triton", **SMALL)
    q, k, _ = rig.tensors(141)
    v = torch.ones(141, 2, 64, dtype=torch.float16, device=device)
    rig.backend.served(rig.model.attention(0)).scales.fix(torch.tensor(0.1), torch.tensor(0.5), "test")
    out = rig.run(rig.extend([2], [0], [140]), 3 * q[:140], k[:140], v[:140])
    last = rig.run(rig.decode([2], [140]), 3 * q[140:], k[140:], v[140:])
    assert torch.equal(out, torch.ones_like(out)) and torch.equal(last, torch.ones_like(last))


def test_chunks_and_pages_give_the_bits_of_the_whole(device, tmp_path, monkeypatch) -> None:
    """Packed side by side, in pages, in a batch with others or alone: a row's bits depend on its own keys."""
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    whole = None
    for page in (1, 16):
        rig = Rig(device=device, kernels="triton", **SMALL, page=page)
        q, k, v = rig.tensors(150)
        parts, before = [], 0
        for size in (1, 63, 86):
            cut = slice(before, before + size)
            parts.append(rig.run(rig.extend([2], [before], [size]), q[cut], k[cut], v[cut]))
            before += size
        if whole is None:
            whole = rig.run(rig.extend([3], [0], [150]), q, k, v)
        assert torch.equal(torch.cat(parts), whole)


def test_first_tokens_are_rescaled_and_padding_gives_zeros(device) -> None:
    twins = Twins(device)
    inputs = [twins.ours.tensors(count, count) for count in (6, 40, 90)]
    for row, tensors in enumerate(inputs, 2):
        count = tensors[0].shape[0]
        twins.step(lambda rig, row=row, count=count: rig.extend([row], [0], [count]), tensors, bound=0.02)
    ours, want = (rig.backend.served(rig.model.attention(0)).scales for rig in twins.rigs)
    assert ours.frozen and torch.equal(ours.k, want.k) and torch.equal(ours.v, want.v)
    for row, tensors in enumerate(inputs, 2):
        twins.same_codes(row, tensors[0].shape[0])
    rig = twins.ours
    q, k, v = rig.tensors(12)
    batch = rig.extend([9], [0], [8])
    rig.backend.init_forward_metadata(batch)
    out = rig.backend.forward_extend(q.flatten(1), k, v, rig.model.attention(0), batch)
    assert out.shape == (12, 128) and not out[8:].any() and out[:8].any()


def test_a_decode_from_a_graphs_buffers(device, tmp_path, monkeypatch) -> None:
    """What a captured decode holds is brought up to date for another batch: on a GPU the graph itself is replayed."""
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2, layers=2)[0])
    rig = Rig(device=device, kernels="triton", **SMALL, windows=(-1, 40), window_layers=(1,))
    rows, lengths = [2, 3, 4], [50, 17, 5]
    for layer in (0, 1):
        rig.run(rig.extend(rows, [0, 0, 0], lengths), *rig.tensors(72), layer)
    q, k, v = rig.tensors(3, 1)
    eager = rig.decode(rows, lengths)
    want = [rig.run(eager, q, k, v, layer) for layer in (0, 1)]
    backend = rig.backend
    backend.init_cuda_graph_state(4, 4)
    # As SGLang captures: four rows of one token each, at request 0 and slot 0.
    held = rig.decode([0] * 4, [0] * 4)
    held.out_cache_loc.zero_()
    rig.requests.req_to_token[0].zero_()
    inputs = [torch.zeros(4, *x.shape[1:], dtype=x.dtype, device=device) for x in (q, k, v)]
    backend.init_forward_metadata_out_graph(held, in_capture=True)
    step = backend.forward_metadata

    def captured() -> list[torch.Tensor]:
        backend.forward_metadata = step
        forward = backend.forward_decode
        return [forward(inputs[0].flatten(1), *inputs[1:], rig.model.attention(n), held) for n in (0, 1)]

    outs = captured()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = captured()
    # Replay with three requests and one row of padding.
    for target, source in zip(inputs, (q, k, v), strict=True):
        target[:3] = source
    held.out_cache_loc[:3] = eager.out_cache_loc
    held.req_pool_indices[:3], held.seq_lens[:3] = eager.req_pool_indices, eager.seq_lens
    held.num_padding, held.seq_lens_cpu, held.seq_lens_sum = 1, None, None
    backend.init_forward_metadata_out_graph(held)
    if device == "cuda":
        graph.replay()
    else:
        outs = captured()
    for out, expected in zip(outs, want, strict=True):
        assert torch.equal(out[:3].view_as(expected), expected)
    with pytest.raises(Unsupported, match="no graph may hold it whole .EXTEND."):
        backend.init_forward_metadata_out_graph(rig.extend([2], [51], [1], ForwardMode.EXTEND), in_capture=True)


def test_what_a_graph_wrote_is_rescaled_too(device) -> None:
    """A replay passes by the methods that note slots while scales are provisional."""
    rig = Rig(device=device, kernels="triton", **SMALL)
    backend, held = rig.backend, rig.backend.served(rig.model.attention(0)).scales
    rig.run(rig.extend([2], [0], [6]), *rig.tensors(6))
    backend.init_cuda_graph_state(1, 1)
    batch = rig.decode([2], [6])
    batch.num_padding = 0
    q, k, v = rig.tensors(1, 1)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    step = backend.forward_metadata
    backend.init_forward_metadata_out_graph(batch)
    backend.forward_metadata = step
    backend.path.observe = lambda *_: None  # as a replay does
    rig.backend.forward_decode(q.flatten(1), k, v, rig.model.attention(0), batch)
    del backend.path.observe
    assert not held.frozen
    rig.run(rig.extend([3], [0], [130]), *rig.tensors(130, 2))
    assert held.frozen
    value = rig.bytes_of(2, 7)[1][-1].float() * held.v[:, None]
    assert error(value, v[0]) < 0.06
    assert not backend.path._saturation[rig.backend.served(rig.model.attention(0)).name].counts.any()
    rig.run(rig.extend([4], [0], [2]), q.repeat(2, 1, 1), k.repeat(2, 1, 1), torch.full_like(v, 1000).repeat(2, 1, 1))
    counted = backend.path._saturation[rig.backend.served(rig.model.attention(0)).name].counts
    assert counted.tolist() == [0, 2 * v.numel()]


def test_the_engines_decode_reads_what_one_launch_wrote(device, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    outs = []
    for kernels in ("triton", "torch"):
        rig = Rig(decode="torch_native", device=device, kernels=kernels, **SMALL)
        native = pair(rig, monkeypatch)
        assert isinstance(native, TorchNativeAttnBackend)
        rig.run(rig.extend([2, 3], [0, 0], [20, 5]), *rig.tensors(25))
        outs.append(rig.run(rig.decode([2, 3], [20, 5]), *rig.tensors(2, 1), backend=native))
    assert error(outs[0], outs[1]) < 0.005


def test_layers_only_launch(device, tmp_path, monkeypatch) -> None:
    """No layer of a step waits for the GPU: on a GPU CUDA itself tells, elsewhere the calls that would wait do."""
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    rig = Rig(device=device, kernels="triton", **SMALL)
    batches = [(rig.extend([2], [0], [20]), rig.tensors(20)), (rig.decode([2], [20]), rig.tensors(1))]

    def run_all() -> None:
        for batch, (q, k, v) in batches:
            rig.backend.init_forward_metadata(batch)
            forward = rig.backend.forward_decode if batch.forward_mode.is_decode() else rig.backend.forward_extend
            forward(q.flatten(1), k, v, rig.model.attention(0), batch)

    run_all()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_all()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoWaiting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            waits = ("_local_scalar_dense", "nonzero", "unique", "equal.default", "masked_select")
            assert not any(name in str(func) for name in waits), f"{func} waits for the GPU"
            return func(*args, **(kwargs or {}))

    from zyfa_kernels.triton import block_table, decode, prefill, rotate_quantize  # noqa: F401

    with NoWaiting():
        run_all()


def test_unquantised_pools_are_the_engines(device, caplog, monkeypatch) -> None:
    monkeypatch.setattr("zyfa_backend.sglang.selection._engine_backend", lambda runner, why: why)
    assert "ZYFA has no kernel on a GPU for a cache that is not quantised" in Rig(
        torch.bfloat16, device=device, kernels="triton"
    ).backend
    monkeypatch.setenv("ZYFA_CONFIG", "unquantized,rotation=hadamard")
    with pytest.raises(Unsupported, match="has no kernel on cuda; those there quantise all three"):
        Rig(torch.bfloat16, device=device, kernels="triton")
    monkeypatch.delenv("ZYFA_CONFIG")
    with pytest.raises(Unsupported, match="dtype fp32 on a GPU .supported: bf16, fp16"):
        Rig(dtype=torch.float32, device=device, kernels="triton")


@pytest.mark.parametrize("form", ["one call", "chunk"])
def test_mla(form, device, monkeypatch) -> None:
    """Contiguous K and V of 192/128, a request with its own scales alone in the batch, then with a NaN beside it.

    On a GPU the scales are the powers of two above those of the reference, which takes the same here.
    """
    from tests.sglang import test_mla as rig
    from zyfa_backend import reference

    exact = reference.calibrate_scale
    monkeypatch.setattr(reference, "calibrate_scale", lambda *a, **b: torch.exp2(exact(*a, **b).log2().ceil()))

    q, k, v = (x.half() for x in rig.tensors(6, 30, device))
    outs = []
    for kernels, prefixes, new in (("triton", (24,), (6,)), ("torch", (24,), (6,)), ("triton", (24, 0), (6, 2))):
        held = rig.runner(FP8, device=device)
        held.dtype = torch.float16
        backend = selection.create(held, kernels)
        batch = rig.batch_of(prefixes, new, device)
        batch.mha_one_shot, batch.mha_return_lse = form == "one call", True
        batch.attn_attend_prefix_cache = form == "chunk"
        batch.prefix_chunk_idx, batch.prefix_chunk_seq_lens_cpu = 0, torch.tensor([prefixes])
        first, last = {"one call": (0, 30), "chunk": (0, 24)}[form]
        extra = torch.full((2, *q.shape[1:]), torch.nan, dtype=q.dtype, device=device)
        operands = [q, k[first:last], v[first:last]]
        if len(new) > 1:
            operands[0] = torch.cat([q, extra])
            if form != "chunk":
                operands[1:] = [torch.cat([x, extra[..., : x.shape[-1]]]) for x in operands[1:]]
        out, lse = rig.run(backend, batch, *operands)
        outs.append((out[:6].float(), lse[:6]))
    # Hopper's FP8 products keep 14 bits of a score, of which the LSE here is some 4 at a step of 2^-10.
    bound = 5e-3 if device == "cuda" else 1e-3
    for out, lse in outs[1:]:
        assert error(outs[0][0], out) < BOUND and (outs[0][1] - lse).abs().max() < bound
    name = f"triton/fp8-mla-{'full' if form == 'chunk' else 'causal'}-lean"
    assert zyfa_backend.counters.snapshot()["kernels"][name] == {"calls": 2, "tokens": 14}
