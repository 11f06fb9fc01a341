"""The engine's own decode over a cache that ZYFA's prefill rotated and scaled."""

from __future__ import annotations

import math

import pytest
import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from tests.sglang.codec import decode, encode, rotated
from tests.sglang.rig import FP8, Rig, attention, error, layer_name
from tests.sglang.test_backend import scale_file
from zyfa_backend.config import LEAN, ConfigError
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.scales import LayerScales, write
from zyfa_backend.sglang import hybrid


def pair(rig: Rig, monkeypatch) -> TorchNativeAttnBackend:
    """torch_native paired with ZYFA's prefill, by SGLang's own class."""
    from sglang.srt.layers.attention import hybrid_attn_backend as module

    # 0.5.18 asks the runner's arguments, later ones what is running.
    rig.runner.server_args.speculative_attention_mode = "prefill"
    monkeypatch.setattr(module, "get_spec", lambda: rig.runner.server_args, raising=False)
    rig.runner.model_config.context_len = 1024
    native = TorchNativeAttnBackend(rig.runner)
    both = HybridAttnBackend(model_runner=rig.runner, prefill_backend=rig.backend, decode_backend=native)
    assert both.decode_backend is native
    return native


@pytest.mark.parametrize("cache", [FP8, torch.bfloat16], ids=["fp8", "bf16"])
def test_foreign_decode_reads_and_writes_what_zyfa_does(cache, device, tmp_path, monkeypatch) -> None:
    """Scales differ for every head and K and V; torch_native knows neither them nor the rotation."""
    if cache == FP8:
        monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    else:
        monkeypatch.setenv("ZYFA_CONFIG", "unquantized,rotation=hadamard")
    rig = Rig(cache, decode="torch_native", device=device)
    native = pair(rig, monkeypatch)
    lengths, rows = (0, 1, 63, 200), [rig.request() for _ in range(4)]
    q, k, v = rig.tensors(4, 9)
    kept = [x.clone() for x in (q, k, v)]
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length:
            rig.run(rig.extend([row], [0], [length]), *rig.tensors(length, n))
    out = rig.run(rig.decode(rows, lengths), q, k, v, backend=native)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), kept, strict=True)), "the caller's tensors changed"
    scales = rig.backend.served(rig.model.attention(0)).scales
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        k_held, v_held = rig.bytes_of(row, length + 1)
        if cache == FP8:
            k_held = decode(k_held) * scales.k.cpu()[:, None].double()
            v_held = decode(v_held) * scales.v.cpu()[:, None].double()
        want = attention(rotated(q[n : n + 1]), k_held.cpu(), v_held.cpu(), 128**-0.5)
        # Beyond the cache's own rounding only bf16's of the turned query, of the product and of the result.
        assert error(out[n : n + 1].cpu(), want) < 0.01
    # A twin that ZYFA wrote holds the same bytes.
    twin = rig.request()
    rig.run(rig.extend([twin], [0], [4]), q, k, v)
    for part, ours in enumerate(rig.bytes_of(twin, 4)):
        theirs = [rig.bytes_of(row, length + 1)[part][-1] for row, length in zip(rows, lengths, strict=True)]
        assert torch.equal(ours.view(torch.uint8), torch.stack(theirs).view(torch.uint8))


def test_without_the_adaptation_the_same_decode_is_wrong(device, tmp_path, monkeypatch) -> None:
    """What the test above would miss if the cache were not rotated and scaled at all."""
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    rig = Rig(decode="torch_native", device=device)
    row = rig.request()
    q, k, v = rig.tensors(201)
    rig.run(rig.extend([row], [0], [200]), q[:200], k[:200], v[:200])
    plain = TorchNativeAttnBackend(rig.runner)
    out = rig.run(rig.decode([row], [200]), q[200:], k[200:].clone(), v[200:].clone(), backend=plain)
    assert error(out.cpu(), attention(q[200:], k, v, 128**-0.5).cpu()) > 0.5


def test_the_checkpoints_scales_are_taken_over(device, monkeypatch) -> None:
    """The engine's backend must not apply them a second time."""
    rig = Rig(decode="torch_native", device=device)
    layer = rig.model.attention(0)
    layer.k_scale = layer.v_scale = torch.nn.Parameter(torch.tensor(0.25), requires_grad=False)
    layer.k_scale_float, layer.v_scale_float = 0.25, 0.125
    rig.backend = type(rig.backend)(rig.runner)
    scales = rig.backend.served(layer).scales
    assert (scales.k.unique().tolist(), scales.v.unique().tolist()) == ([1.0], [0.125])
    assert scales.source == "checkpoint, K's raised for the engine's decode"
    native = pair(rig, monkeypatch)
    row = rig.request()
    q, k, v = rig.tensors(101)
    rig.run(rig.extend([row], [0], [100]), q[:100], k[:100], v[:100])
    out = rig.run(rig.decode([row], [100]), q[100:], k[100:], v[100:], backend=native)
    assert layer.k_scale is None and layer.k_scale_float is None
    assert error(out.cpu(), attention(q[100:], k, v, 128**-0.5).cpu()) < 0.08


@pytest.mark.parametrize("scale", [0.0002, 0.005, 0.02, 0.9, 3.0])
def test_a_decode_that_rounds_its_query_to_e4m3_keeps_it(scale, tmp_path, monkeypatch) -> None:
    """As fa3's and triton's decodes do, without a scale. A query that is rounded itself is off by 2.5%."""
    held = {layer_name(0): LayerScales(2)}
    held[layer_name(0)].fix(torch.tensor([scale, 1.4 * scale]), torch.ones(1), "test")
    path = str(tmp_path / "scales.safetensors")
    write(path, held, LEAN)
    monkeypatch.setenv("ZYFA_SCALES", path)
    rig = Rig(decode="triton")
    layer = rig.model.attention(0)
    served = rig.backend.served(layer)
    factor = served.scales.k / held[layer_name(0)].k
    assert factor.unique().numel() == 1 and math.log2(factor[0]).is_integer() and 1 <= factor[0] <= 128
    q, k, _ = rig.tensors(400)
    turned = hybrid.turned_query(q, layer, served, "hadamard").double()
    assert error(decode(encode(turned)), turned) < 0.03
    # K's codes lose no precision of their own by it.
    k = rotated(k) * scale * 100
    step = served.scales.k.double()[:, None]
    assert error(decode(encode(k / step)) * step, k) < 0.03


def test_unquantised_unrotated_caches_leave_the_engine_alone(monkeypatch) -> None:
    rig = Rig(torch.bfloat16, decode="torch_native")
    native = pair(rig, monkeypatch)
    assert "forward_decode" not in vars(native)


def test_scales_stay_at_one_without_a_file_or_checkpoint(monkeypatch) -> None:
    """A captured decode could not follow scales that are found later."""
    rig = Rig(decode="torch_native")
    scales = rig.backend.served(rig.model.attention(0)).scales
    assert scales.frozen and scales.k.tolist() == scales.v.tolist() == [1.0, 1.0]


def test_adapting_twice_turns_queries_once(monkeypatch) -> None:
    rig = Rig(decode="torch_native")
    native = pair(rig, monkeypatch)
    wrapped = native.forward_decode
    hybrid.adapt(native, rig.backend)
    assert native.forward_decode is wrapped
    assert native.get_fused_kv_write_buffers(None, None) is None


def test_int8_codes_are_for_zyfa_alone(monkeypatch) -> None:
    monkeypatch.setenv("ZYFA_CONFIG", "int8")
    with pytest.raises(ConfigError, match="int8 needs --decode-attention-backend zyfa; torch_native reads K as e4m3"):
        Rig(decode="torch_native")


def test_zyfa_does_not_decode_what_another_backend_wrote() -> None:
    with pytest.raises(Unsupported, match="here triton prefills.*--prefill-attention-backend zyfa"):
        Rig(prefill="triton")
    assert Rig(torch.bfloat16, prefill="triton").backend is not None


def test_a_graph_may_capture_the_adaptation() -> None:
    """Nothing of it looks at a value: on tensors without values it runs through."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zyfa_backend import rotation

    rig = Rig(decode="triton")
    layer = rig.model.attention(0)
    served = rig.backend.served(layer)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(3, 4, 128, dtype=torch.bfloat16)
        turned = hybrid.turned_query(q.flatten(1), layer, served, "hadamard")
        out = hybrid.scaled_output(turned, layer, served)
    rotation._stages.cache_clear()
    assert (turned.shape, out.dtype) == ((3, 512), torch.bfloat16)
