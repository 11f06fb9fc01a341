"""vLLM's GPU backend of ZYFA, layer and metadata, on CPU tensors under Triton's interpreter, against the reference.

Runs where TRITON_INTERPRET=1 was set before triton was imported: see test_decode_interpreted.py. What only a GPU has,
the engine's own decode, graphs and calibration on the device, is tested in tests/engine/test_gpu.py.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 and no GPU", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

from zyfa_backend import contiguous, device_saturation, dispatch, reference  # noqa: E402
from zyfa_backend.config import EXACT, INT8, LEAN, AttentionConfig  # noqa: E402
from zyfa_backend.device_scales import DeviceScales  # noqa: E402
from zyfa_backend.oracle import relative_rms  # noqa: E402
from zyfa_backend.quantization import Quantized, calibrate_scale, quantize_kv, quantize_q  # noqa: E402
from zyfa_backend.vllm import gpu, start_up  # noqa: E402

HQ, HKV, D, BLOCK = 6, 2, 64, 16
SCALE = 0.13
LENGTHS = (330, 40, 20)  # keys of two decodes and, of 12 queries, a prefill


LAYER = SimpleNamespace(layer_name="model.layers.3")


class Event:
    """Of the GPU: copies on a CPU are done at once, but tests choose when the host may see them."""

    done = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.done


class EngineConfig(SimpleNamespace):
    """As much of vLLM's configuration as a layer asks for."""


def layer(monkeypatch, text: str, window: int | None = None) -> gpu.ZyfaGpuImpl:
    import vllm.config

    engine = EngineConfig(
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(dtype=torch.float16, max_model_len=1000),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    select = dispatch.select
    monkeypatch.setenv("ZYFA_CONFIG", text)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: engine)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(dispatch, "select", lambda shape, device: select(shape, "cuda"))
    impl = gpu.ZyfaGpuImpl(HQ, D, SCALE, HKV, sliding_window=window, kv_cache_dtype="fp8")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(dispatch, "counters", type(dispatch.counters)())
    return impl


def common(query_lengths: list[int], keys: list[int], table: torch.Tensor, longest: int) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(keys, dtype=torch.int32),
        num_reqs=len(keys), num_actual_tokens=int(starts[-1]), max_query_len=max(query_lengths), max_seq_len=longest,
        block_table_tensor=table, slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64), causal=True,
    )  # fmt: skip


def metadata(
    query_lengths: list[int], keys: list[int], table: torch.Tensor, longest: int, prefilling: list[bool] | None = None
) -> gpu.ZyfaGpuMetadata:
    builder = object.__new__(gpu.ZyfaGpuMetadataBuilder)
    for name in ("seq_threshold_3D", "num_par_softmax_segments", "max_seqs_64_segments"):
        setattr(builder, name, 0)
    for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum", "rswa_window"):
        setattr(builder, name, None)
    step = common(query_lengths, keys, table, longest)
    return builder.build(0, step.replace(is_prefilling=None if prefilling is None else torch.tensor(prefilling)))


class Step:
    """A cache that the layer has filled itself, and queries of two decodes and a prefill."""

    def __init__(self, impl: gpu.ZyfaGpuImpl, config: AttentionConfig) -> None:
        make = torch.Generator().manual_seed(0)
        columns = -(-max(LENGTHS) // BLOCK)
        self.table = torch.randperm(len(LENGTHS) * columns, generator=make).view(-1, columns).to(torch.int32)
        self.k, self.v = (torch.randn(sum(LENGTHS), HKV, D, generator=make).half() for _ in range(2))
        self.q = torch.randn(14, HQ, D, generator=make).half()
        scales = [
            calibrate_scale(x, 1.03, format=form, rotation=rotation).max().reshape(1)
            for x, form, rotation in ((self.k, config.qk_format, config.rotation), (self.v, config.v_format, "none"))
        ]
        impl._scales = SimpleNamespace(k=scales[0], v=scales[1], frozen=True)
        self.scales, self.config = scales, config
        self.cache = torch.full((self.table.numel(), HKV, BLOCK, 2 * D), 0x7F, dtype=torch.uint8)
        slots = [self.table[i, n // BLOCK] * BLOCK + n % BLOCK for i, keys in enumerate(LENGTHS) for n in range(keys)]
        impl.do_kv_cache_update(LAYER, self.k, self.v, self.cache, torch.stack(slots).long())

    def expected(self, window: int | None) -> torch.Tensor:
        config, out, first, row = replace(self.config, tile=128, arithmetic="fused"), [], 0, 0
        k = quantize_kv(self.k, self.scales[0], config.qk_format, config.rotation)
        v = quantize_kv(self.v, self.scales[1], config.v_format)
        for keys, queries in zip(LENGTHS, (1, 1, 12), strict=True):
            part = slice(first, first + keys)
            result, _ = reference.attend(
                quantize_q(self.q[row : row + queries], config),
                Quantized(k[part], self.scales[0].expand(HKV), config.qk_format),
                Quantized(v[part], self.scales[1].expand(HKV), config.v_format),
                softmax_scale=SCALE, causal=True, window=window, context=keys - queries, config=config,
                out_dtype=torch.float16,
            )  # fmt: skip
            out.append(result)
            first, row = first + keys, row + queries
        return torch.cat(out)


@pytest.mark.parametrize(
    ("text", "config", "window"),
    [("int8", INT8, None), ("int8,probabilities=exact", replace(INT8, probabilities="exact"), 90)],
)
def test_int8_is_written_prefilled_and_decoded_by_zyfa(text, config, window, monkeypatch) -> None:
    impl = layer(monkeypatch, text, None if window is None else window + 1)
    step = Step(impl, config)
    out = torch.full_like(step.q, torch.nan)
    step_metadata = metadata([1, 1, 12], list(LENGTHS), step.table, max(LENGTHS))
    assert step_metadata.decodes.num_actual_tokens == 2 and step_metadata.prefills.first_token == 2
    impl.forward(LAYER, step.q, None, None, step.cache, step_metadata, out)
    assert relative_rms(out.double(), step.expected(window).double()) < 0.003
    assert {name: entry["tokens"] for name, entry in dispatch.counters.snapshot()["kernels"].items()} == {
        "triton/rotate-quantize-hd64": sum(LENGTHS),
        f"triton/int8-hd64-decode-{config.probabilities}": 2,
        f"triton/int8-hd64-causal-{config.probabilities}": 12,
    }


def test_a_step_writes_its_tokens_before_it_attends(monkeypatch) -> None:
    """One call does both, so that no captured graph holds the write alone; padding behind the tokens is left out."""
    assert gpu.ZyfaGpuBackend.forward_includes_kv_cache_update
    impl = layer(monkeypatch, "int8")
    assert not impl.fused_rope_kvcache_supported()
    step = Step(impl, INT8)
    want = torch.full_like(step.q, torch.nan)
    step_metadata = metadata([1, 1, 12], list(LENGTHS), step.table, max(LENGTHS))
    impl.forward(LAYER, step.q, None, None, step.cache, step_metadata, want)
    last = [329, 330 + 39, *range(330 + 40 + 8, 330 + 40 + 20)]
    places = [(0, 329), (1, 39), *((2, n) for n in range(8, 20))]
    slots = torch.stack([step.table[i, n // BLOCK] * BLOCK + n % BLOCK for i, n in places]).long()
    written = step.cache.clone()
    for slot in slots.tolist():
        step.cache[slot // BLOCK, :, slot % BLOCK] = 0x7F
    step_metadata.slot_mapping = slots
    key, value = (torch.nn.functional.pad(x[last], (0, 0, 0, 0, 0, 2), value=torch.nan) for x in (step.k, step.v))
    out = torch.full((16, HQ, D), torch.nan, dtype=torch.float16)
    impl.forward(LAYER, torch.cat([step.q, step.q[:2]]), key, value, step.cache, step_metadata, out)
    assert torch.equal(step.cache, written)
    assert torch.equal(out[:14], want) and out[14:].isnan().all()


def test_a_batch_padded_to_a_graph_with_the_longest_of_the_model(monkeypatch) -> None:
    """What a captured decode is given: rows of padding with no keys, max_seq_len of the model, and the same bits."""
    impl = layer(monkeypatch, "int8")
    step = Step(impl, INT8)
    out = torch.full_like(step.q, torch.nan)
    impl.forward(LAYER, step.q, None, None, step.cache, metadata([1, 1], [330, 40], step.table[:2], 330), out)
    table = torch.cat([step.table, torch.zeros_like(step.table[:1])])
    table = torch.cat([table, torch.zeros(4, 43, dtype=torch.int32)], 1)
    padded = torch.full((4, HQ * D), torch.nan, dtype=torch.float16)
    keys = [330, 40, 0, 0]
    impl.forward(LAYER, step.q[:4], None, None, step.cache, metadata([1] * 4, keys, table, 1024), padded)
    padded = padded.view(4, HQ, D)
    assert torch.equal(padded[:2], out[:2]) and not padded[2:].any()


def test_a_padded_step_that_tells_of_its_requests_alone() -> None:
    """vLLM pads the lengths of a step to a graph's size, and not which requests are being prefilled."""
    table = torch.zeros(4, 30, dtype=torch.int32)
    decodes = metadata([1] * 4, [330, 40, 20, 0], table, 1024, prefilling=[False] * 3)
    assert decodes.prefills is None and decodes.decodes.num_actual_tokens == 4
    mixed = metadata([1, 1, 1, 0], [330, 40, 20, 0], table, 1024, prefilling=[False, True, True])
    assert mixed.decodes.num_actual_tokens == 1 and mixed.prefills.first_token == 1


def test_made_up_tokens_of_the_start_calibrate_nothing(monkeypatch) -> None:
    impl = layer(monkeypatch, "int8")
    step = Step(impl, INT8)
    offered = []
    impl._scales = SimpleNamespace(k=step.scales[0], v=step.scales[1], frozen=False, offer=lambda *x: offered.append(x))
    tokens = step.k[:2], step.v[:2], step.cache, torch.tensor([0, 1])
    impl._saturation.counts.fill_(7)
    start_up._noted(impl.do_kv_cache_update)(LAYER, *tokens)
    assert not offered and impl._saturation.counts.tolist() == [7, 7] and not start_up.rehearsing()
    impl.do_kv_cache_update(LAYER, *tokens)
    assert len(offered) == 1
    with pytest.raises(ZeroDivisionError):
        start_up._noted(lambda: 1 / 0)()
    assert not start_up.rehearsing()


@pytest.mark.parametrize("block,kernels", [(16, 16), (32, 32), (128, 128), (48, 16), (256, 128), (544, 32)])
def test_blocks_of_the_engine_are_cut_into_those_of_the_prefill(block: int, kernels: int) -> None:
    """The engine makes blocks larger for models with other caches beside, after a backend was chosen."""
    from vllm.v1.worker.utils import select_common_block_size

    assert gpu.ZyfaGpuBackend.supports_block_size(block)
    assert select_common_block_size(block, [gpu.ZyfaGpuBackend]) == kernels
    assert not gpu.ZyfaGpuBackend.supports_block_size(24)


@pytest.mark.parametrize("rocm,served,refused", [(False, (8, 9), (8, 6)), (True, (9, 4), (9, 0))])
def test_gpus_without_fp8_are_refused_by_name(rocm: bool, served, refused, monkeypatch) -> None:
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(gpu.current_platform), "is_rocm", lambda self: rocm)

    def reasons(capability: tuple[int, int]) -> list[str]:
        return gpu.ZyfaGpuBackend.validate_configuration(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype="fp8", block_size=None, use_mla=False, has_sink=False,
            use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, attn_type="decoder",
            device_capability=DeviceCapability(*capability),
        )  # fmt: skip

    assert reasons(served) == []
    (reason,) = reasons(refused)
    assert f"compute capability {refused[0]}.{refused[1]} (supported: 8.9 and later, on ROCm 9.4" in reason


@pytest.mark.parametrize(
    "sequences,keys,expected",
    [
        (3, 1000, 3 * 8 * 128 * 2 * 64),  # all three at once, eight tiles of 128 keys
        (4096, 1000, 1 << 29),  # in parts of half a GiB
        (1, 1 << 23, (1 << 23) * 2 * 64),  # a sequence of its own is never cut
    ],
)
def test_what_a_prefill_takes_at_most(sequences: int, keys: int, expected: int) -> None:
    assert gpu.workspace_bytes(sequences, keys, HKV, D) == expected


def test_what_a_prefill_takes_is_seen_by_the_engine(monkeypatch) -> None:
    """It sizes its cache by what a step without attention's metadata leaves free."""
    impl, made, empty = layer(monkeypatch, "lean"), [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: made.append(size) or empty(*size, **options))
    out = torch.ones(4, HQ, D)
    for rehearsing, sizes in ((0, []), (1, [(3 * 8 * 128 * 2 * 64,)])):
        monkeypatch.setattr(start_up, "_running", rehearsing)
        impl.forward(LAYER, out, out, out, out, None, out)
        assert made == sizes and not out.any()


def test_the_v1_runner_replays_no_decode() -> None:
    """It takes a decode's graph for a prompt of one token, too, whose scales nobody would calibrate."""
    support = gpu.ZyfaGpuMetadataBuilder.get_cudagraph_support
    assert support(SimpleNamespace(use_v2_model_runner=False), None).name == "NEVER"
    assert support(SimpleNamespace(use_v2_model_runner=True), None).name == "UNIFORM_SINGLE_TOKEN_DECODE"


def test_compiled_graphs_of_other_sources_are_not_taken(monkeypatch) -> None:
    import vllm.envs

    layer(monkeypatch, "int8")
    before = vllm.envs.compile_factors()
    digest = hashlib.sha256()
    for path in sorted(Path(gpu.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    assert before[start_up.SOURCES] == digest.hexdigest()


@pytest.mark.parametrize("beside", [1.0, 1.7, 5.0])
def test_requests_of_an_mla_call_do_not_move_each_other(beside) -> None:
    """FP8 itself is off by some 4%; a scale that is no power of two would round anew what others make it cover."""
    make = torch.Generator().manual_seed(3)
    lengths = (40, 25)
    q, k = (torch.randn(sum(lengths), 2, 192, generator=make).half() for _ in range(2))
    v = torch.randn(sum(lengths), 2, 128, generator=make).half()
    k[lengths[0] :] *= beside
    v[lengths[0] :] *= beside

    def run(count: int) -> torch.Tensor:
        cu = torch.tensor([0, *lengths[:count]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        end = int(cu[-1])
        return contiguous.attend(q[:end], k[:end], v[:end], cu, cu, (max(lengths), max(lengths)), SCALE, True, LEAN)[0]

    alone, together = run(1), run(2)[: lengths[0]]
    assert relative_rms(together.double(), alone.double()) < 1e-4
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x[: lengths[0]].double().transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=SCALE
    ).transpose(0, 1)
    assert 0.01 < relative_rms(alone.double(), exact) < 0.08


def test_while_a_graph_is_captured_no_event_is_asked(monkeypatch) -> None:
    scales = object.__new__(DeviceScales)
    scales.frozen, scales._copied = False, object()  # which has no query()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    scales.offer(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), torch.tensor([0]))
    saturation = device_saturation.DeviceSaturation("x", torch.device("cpu"))
    saturation.begin()
    saturation._copied = object()
    saturation.look()


@pytest.mark.parametrize("config", [LEAN, EXACT])
def test_fp8_is_decoded_by_the_engine(config, monkeypatch) -> None:
    """The engine's kernel gets the query turned as K is, and the norm that this leaves out in its scale."""
    impl = layer(monkeypatch, config.probabilities)
    step = Step(impl, config)
    seen = []
    monkeypatch.setattr(gpu.TritonAttentionImpl, "forward", lambda self, *args: seen.append((self.scale, *args)))
    decodes = metadata([1, 1], [330, 40], step.table[:2], 330)
    impl.forward(LAYER, step.q, None, None, step.cache, decodes, torch.empty_like(step.q))
    ((scale, scales, turned, *_),) = seen
    products = turned.double() @ turned.double().transpose(1, 2)
    plain = step.q[:2].double() @ step.q[:2].double().transpose(1, 2)
    assert relative_rms(products * (scale / SCALE) ** 2, plain) < 0.002
    assert (scales._k_scale, scales._v_scale) == tuple(step.scales)
    assert dispatch.counters.snapshot()["kernels"]["engine/fp8-hd64-decode"]["tokens"] == 2


def test_saturation_is_counted_and_reported_by_later_prefills(monkeypatch, caplog) -> None:
    impl = layer(monkeypatch, "int8")
    step = Step(impl, INT8)
    key, value = torch.zeros(3, HKV, D).half(), torch.zeros(3, HKV, D).half()
    key[0, 0, 5] = 40000.0  # rotated, it is spread over its 64 channels
    value[:, 1, :10] = 40000.0
    slots = torch.tensor([0, -1, 1])
    prefill = metadata([12], [330], step.table[:1], 330)
    clock = [100.0]
    monkeypatch.setattr(device_saturation.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(impl, "_prefill", lambda *args: None)  # slow here, and tested above

    def lost() -> int:
        impl.forward(LAYER, step.q[:12], None, None, step.cache, prefill, torch.empty_like(step.q[:12]))
        return dispatch.counters.snapshot()["events"].get("saturated values", 0)

    monkeypatch.setattr(Event, "done", False)
    impl.do_kv_cache_update(LAYER, key, value, step.cache, slots)
    assert lost() == lost() == 0, "the copy is under way"
    monkeypatch.setattr(Event, "done", True)
    with caplog.at_level("WARNING", "vllm.zyfa"):
        assert lost() == 64 + 20
    assert "84 K and V values of model.layers.3 saturated" in caplog.text and "ZYFA_HEADROOM" in caplog.text
    impl.do_kv_cache_update(LAYER, key, value, step.cache, slots)
    assert lost() == lost() == 84, "the host looks once a second"
    clock[0] += 1.5
    assert (lost(), lost()) == (84, 168)
