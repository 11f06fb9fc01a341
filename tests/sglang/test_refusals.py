"""What ZYFA does not serve is refused by name when the server starts, or left to the engine when asked to."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tests.sglang.rig import Rig
from tests.sglang.test_backend import scale_file
from zyfa_backend.config import ConfigError
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.sglang import checks, selection
from zyfa_backend.sglang.backend import ZyfaAttnBackend


@pytest.mark.parametrize(
    "arguments,reason",
    [
        ({"logit_cap": 30.0}, "soft cap 30.0"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type encoder_only"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attention type decoder_bidirectional"),
        ({"pos_encoding_mode": "ALIBI"}, "position encoding ALIBI inside attention"),
        ({"use_irope": True}, "chunked local attention"),
        ({"dim": 80}, "head dimension 80 has no kernel; there are kernels for 64, 96, 128, 192"),
        ({"v_head_dim": 64}, "head dimensions 128/64 have no kernel; only 192/128 may differ"),
        ({"cache": torch.float8_e5m2}, "KV cache dtype float8_e5m2 (supported: auto, fp8_e4m3, fp16, bf16, fp32)"),
        ({"dtype": torch.float64}, "dtype torch.float64 (supported: fp16, bf16, fp32)"),
    ],
)
def test_layers_and_caches(arguments: dict, reason: str) -> None:
    with pytest.raises(Unsupported) as refused:
        Rig(**arguments)
    assert reason in str(refused.value)
    assert "ZYFA_FALLBACK=1 leaves the model to the engine's own backend" in str(refused.value)


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding (EAGLE)"),
        ({"disaggregation_mode": "decode"}, "disaggregated serving (--disaggregation-mode decode)"),
        ({"dcp_size": 2}, "decode context parallelism (--dcp-size 2)"),
        ({"attn_cp_size": 2}, "context parallelism (--attn-cp-size 2)"),
        ({"dllm_algorithm": "LowConfidence"}, "diffusion language models (--dllm-algorithm LowConfidence)"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_pdmux": True}, "multiplexed prefill and decode (--enable-pdmux)"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache with scales that are found while"),
        ({"enable_lmcache": True}, "Set ZYFA_SCALES to a file that ZYFA_SAVE_SCALES wrote"),
    ],
)
def test_settings_of_the_server(changes: dict, reason: str) -> None:
    runner = Rig().runner
    for name, value in changes.items():
        setattr(runner.server_args, name, value)
    with pytest.raises(Unsupported, match=reason.replace("(", r"\(").replace(")", r"\)")):
        selection.create(runner)


@pytest.mark.parametrize("layout", ["vectorized_5d", "hnd"])
def test_cache_layouts_by_name(layout: str) -> None:
    runner = Rig().runner
    runner.token_to_kv_pool.kv_cache_layout = layout
    with pytest.raises(Unsupported, match=rf"KV cache layout {layout} \(supported: nhd; unset SGLANG_"):
        selection.create(runner)


def test_other_pools_by_name() -> None:
    class PageMajorPool(MHATokenToKVPool):
        pass

    runner = Rig().runner
    runner.token_to_kv_pool.__class__ = PageMajorPool
    with pytest.raises(Unsupported, match="KV pool PageMajorPool .supported: MHATokenToKVPool, SWAKVPool"):
        selection.create(runner)


def test_a_cache_that_outlives_the_pool_is_served_with_known_scales(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    runner = Rig().runner
    runner.server_args.enable_hierarchical_cache = True
    assert type(selection.create(runner)) is ZyfaAttnBackend
    monkeypatch.delenv("ZYFA_SCALES")
    runner.decode_attention_backend_str = "triton"  # whose scales are known from the start
    assert type(selection.create(runner)) is ZyfaAttnBackend


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias", "learnable_sink_param", "sink_k"])
def test_models_with_sinks_are_refused_when_the_server_starts(name: str) -> None:
    runner = Rig().runner
    setattr(runner.model.model.layers[0].self_attn, name, torch.nn.Parameter(torch.zeros(4)))
    with pytest.raises(Unsupported, match=rf"attention sinks \(model.layers.0.self_attn.{name}\)"):
        selection.create(runner)


def test_sinks_and_other_arguments_of_a_call_are_refused(device) -> None:
    rig = Rig(device=device)
    q, k, v = rig.tensors(3)
    batch = rig.extend([rig.request()], [0], [3])
    for arguments, reason in (
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"score_mod": len}, "the argument score_mod"),
        ({"q_rope": q}, "absorbed MLA"),
    ):
        with pytest.raises(Unsupported, match=reason):
            rig.run(batch, q, k, v, **arguments)
    assert rig.run(batch, q, k, v, sinks=None).shape == q.shape


def test_a_cache_and_numerics_that_contradict(monkeypatch) -> None:
    monkeypatch.setenv("ZYFA_CONFIG", "lean")
    with pytest.raises(ConfigError, match="add --kv-cache-dtype fp8_e4m3 or set ZYFA_CONFIG=unquantized"):
        Rig(torch.bfloat16)
    monkeypatch.setenv("ZYFA_CONFIG", "unquantized")
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3 holds one byte a value"):
        Rig()


def test_scale_files_and_several_processes(tmp_path, monkeypatch) -> None:
    runner = Rig().runner
    monkeypatch.setenv("ZYFA_SAVE_SCALES", str(tmp_path / "scales.safetensors"))
    runner.server_args.tp_size = 2
    with pytest.raises(ConfigError, match=r"this engine has 2 \(tensor parallel 2, pipeline 1\)"):
        selection.create(runner)


def test_zyfas_own_decode_is_not_captured_in_a_graph() -> None:
    rig = Rig()
    for capture in (
        lambda: rig.backend.init_cuda_graph_state(8, 8),
        lambda: rig.backend.init_forward_metadata_out_graph(rig.decode([rig.request()], [0]), in_capture=True),
    ):
        with pytest.raises(Unsupported, match="fp8-hd128-decode-lean.*--disable-cuda-graph, or choose a --decode"):
            capture()


def test_fallback_leaves_the_model_to_the_engine(monkeypatch, caplog) -> None:
    monkeypatch.setenv("ZYFA_FALLBACK", "1")
    rig = Rig(logit_cap=30.0)
    assert type(rig.backend) is TorchNativeAttnBackend
    assert "soft cap 30.0. ZYFA_FALLBACK: the engine's torch_native serves it" in caplog.text


def test_a_plain_layer_and_runner_have_nothing_against_them() -> None:
    runner = Rig().runner
    assert checks.runner_reasons(runner) == checks.pool_reasons(runner.token_to_kv_pool, False) == []
    assert checks.call_reasons({"sinks": None, "return_lse": False}) == []
    mla = checks.pool_reasons(runner.token_to_kv_pool, True)
    assert mla == ["KV pool MHATokenToKVPool with MLA"]
