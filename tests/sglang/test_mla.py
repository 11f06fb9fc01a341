"""MLA's prefill: which form SGLang is asked for, and attention of each form against fp64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

import zyfa_backend
from tests.sglang.codec import decode, encode, quantized_query, rotated
from tests.sglang.rig import attention, error
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.sglang import mla, selection

HEADS, SCALE = 4, 192**-0.5
PREFIXES, NEW = (0, 64, 130), (65, 1, 40)


def runner(cache: torch.dtype = torch.bfloat16, decode: str = "torch_native", device: str = "cpu", **model):
    pool = MLATokenToKVPool(
        1024, page_size=1, dtype=cache, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=1, device=device,
        enable_memory_saver=False,
    )
    dims = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "is_encoder_decoder": False, **model}
    return SimpleNamespace(
        device=device, dtype=torch.bfloat16, kv_cache_dtype=cache, token_to_kv_pool=pool, kv_index_translator=None,
        req_to_token_pool=ReqToTokenPool(8, 512, device, enable_memory_saver=False), model=None,
        model_config=SimpleNamespace(**dims), server_args=SimpleNamespace(), use_mla_backend=True,
        prefill_attention_backend_str="zyfa", decode_attention_backend_str=decode,
    )


def batch_of(prefixes, new, device: str = "cpu", mode: ForwardMode = ForwardMode.EXTEND) -> ForwardBatch:
    lengths = torch.tensor([a + b for a, b in zip(prefixes, new, strict=True)], device=device)
    tokens = sum(new)
    batch = ForwardBatch(
        forward_mode=mode, batch_size=len(new), input_ids=torch.zeros(tokens, dtype=torch.long, device=device),
        req_pool_indices=torch.arange(1, len(new) + 1, device=device), seq_lens=lengths,
        out_cache_loc=torch.arange(1, tokens + 1, device=device), seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths.cpu(),
    )
    batch.extend_prefix_lens, batch.extend_seq_lens = (torch.tensor(list(x), device=device) for x in (prefixes, new))
    batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = list(prefixes), list(new)
    return batch


def layer(device: str = "cpu") -> RadixAttention:
    return RadixAttention(HEADS, 192, SCALE, HEADS, 0, v_head_dim=128).to(device)


def tensors(tokens: int, keys: int, device: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, HEADS, 192), (keys, HEADS, 192), (keys, HEADS, 128))
    return [torch.randn(shape, generator=random).bfloat16().to(device) for shape in shapes]


def run(backend, batch, q, k, v, **arguments):
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend)):
        return layer(q.device.type)(
            q.flatten(1), k, v, batch, save_kv_cache=False, key_value_num_tokens=k.shape[0], **arguments
        )


def as_stored(x: torch.Tensor, turn: bool) -> torch.Tensor:
    """What FP8 with a scale per head leaves of one request's K or V, fp64, rotated if `turn`.

    On a GPU the scale is the next power of two.
    """
    on_gpu = x.device.type != "cpu"
    x = rotated(x) if turn else x.double().cpu()
    scale = x.abs().amax((0, 2), keepdim=True) / 448
    if on_gpu:
        scale = torch.exp2(scale.log2().ceil())
    return decode(encode(x / scale)) * scale


# A code of P is off by 2.6% rms (a step of an eighth of a binade), which flat rows of random V show in full.
@pytest.mark.parametrize("cache,bound", [(torch.bfloat16, 0.004), (torch.float8_e4m3fn, 0.03)], ids=["bf16", "fp8"])
def test_all_tokens_in_one_call(cache, bound, device) -> None:
    """SGLang's one-shot form: k and v hold the prefix of every request, too."""
    zyfa_backend.counters.reset()
    backend = selection.create(runner(cache, device=device))
    lengths = [a + b for a, b in zip(PREFIXES, NEW, strict=True)]
    q, k, v = tensors(sum(NEW), sum(lengths), device)
    batch = batch_of(PREFIXES, NEW, device)
    batch.mha_one_shot, batch.mha_return_lse = True, False
    out = run(backend, batch, q, k, v)
    assert out.shape == (sum(NEW), HEADS * 128)
    parts = zip(out.view(-1, HEADS, 128).split(NEW), q.split(NEW), k.split(lengths), v.split(lengths), strict=True)
    for part, query, keys, values in parts:
        if cache == torch.bfloat16:
            want = attention(query, keys, values, SCALE)
        else:
            want = attention(quantized_query(query), as_stored(keys, True), as_stored(values, False), SCALE)
        assert error(part.cpu(), want.cpu()) < (bound if part.shape[0] > 1 else 1 / 16)
    stem = "bf16-mla-causal" if cache == torch.bfloat16 else "fp8-mla-causal-lean"
    name = f"{'torch' if device == 'cpu' else 'triton'}/{stem}"
    assert zyfa_backend.counters.snapshot()["kernels"] == {name: {"calls": 1, "tokens": sum(NEW)}}


@pytest.mark.unquantised
def test_prefix_in_chunks_merges_to_the_whole(device) -> None:
    """The form for long prefixes: new tokens, then each chunk of the prefix, each with its LSE."""
    backend = selection.create(runner(device=device))
    chunk, (q, k, v) = 64, tensors(sum(NEW), sum(PREFIXES) + sum(NEW), device)
    lengths = [a + b for a, b in zip(PREFIXES, NEW, strict=True)]
    keys, values = k.split(lengths), v.split(lengths)
    batch = batch_of(PREFIXES, NEW, device)
    batch.mha_one_shot, batch.mha_return_lse, batch.attn_attend_prefix_cache = False, True, False
    new = [torch.cat([x[p:] for x, p in zip(held, PREFIXES, strict=True)]) for held in (keys, values)]
    out, lse = run(backend, batch, q, *new)
    assert out.shape == (sum(NEW), HEADS, 128) and lse.shape == (sum(NEW), HEADS)
    batch.attn_attend_prefix_cache = True
    sizes = torch.tensor([[max(0, min(chunk, p - start)) for p in PREFIXES] for start in (0, 64, 128)])
    batch.prefix_chunk_seq_lens_cpu = sizes
    for index, start in enumerate((0, 64, 128)):
        batch.prefix_chunk_idx = index
        part = [
            torch.cat([x[start : start + n] for x, n in zip(held, sizes[index].tolist(), strict=True)])
            for held in (keys, values)
        ]
        more, more_lse = run(backend, batch, q, *part)
        out, merged = zyfa_backend.reference.merge_states(out, lse.T, more, more_lse.T)
        lse = merged.T
    for part, part_lse, query, ks, vs in zip(out.split(NEW), lse.split(NEW), q.split(NEW), keys, values, strict=True):
        assert error(part.cpu(), attention(query, ks, vs, SCALE).cpu()) < 0.006
        scores = torch.einsum("qhd,khd->qhk", query.double(), ks.double()) * SCALE
        scores[:, :, ks.shape[0] - query.shape[0] :] += torch.full(
            (query.shape[0], query.shape[0]), -torch.inf, device=q.device
        ).triu(1)[:, None]
        assert (part_lse - scores.logsumexp(-1)).abs().max() < 1e-4


def test_the_form_that_sglang_is_asked_for() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    selection.create(runner())
    assert AttentionBackendRegistry.get_handler("zyfa") is mla.forward_method
    attention_layer = SimpleNamespace()
    assert mla.forward_method(attention_layer, batch_of((0, 0), (3, 4))) == AttnForwardMethod.MHA
    assert mla.forward_method(attention_layer, batch_of((0, 9), (3, 4))) == AttnForwardMethod.MHA_ONE_SHOT
    decoding = batch_of((5,), (1,), mode=ForwardMode.DECODE)
    assert mla.forward_method(attention_layer, decoding) == AttnForwardMethod.MLA
    # Not on a CPU, where the engine has no kernel that merges partial results.
    long = batch_of((9,), (3,))
    long.seq_lens = SimpleNamespace(device=torch.device("cuda"))
    long.get_max_chunk_capacity = lambda: 11
    assert mla.forward_method(attention_layer, long) == AttnForwardMethod.MHA_CHUNKED_KV
    long.get_max_chunk_capacity = lambda: 12
    assert mla.forward_method(attention_layer, long) == AttnForwardMethod.MHA_ONE_SHOT


def test_the_prefills_graphs_are_turned_off(monkeypatch, caplog) -> None:
    """They are on by default on CUDA, and SGLang asks its own configuration whether to capture them."""
    from sglang.srt.model_executor import cuda_graph_config as module

    phases = (module.PhaseConfig(backend=module.Backend.FULL), module.PhaseConfig(backend=module.Backend.BREAKABLE))
    held = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=module.CudaGraphConfig(*phases)))
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: held)
    monkeypatch.setattr(module, "get_exec", lambda: held, raising=False)  # 0.5.18 imports it when asked
    selection.create(runner())
    assert module.check_cuda_graph_backend(module.Phase.PREFILL, module.Backend.DISABLED)
    assert module.check_cuda_graph_backend(module.Phase.DECODE, module.Backend.FULL)
    assert "MLA's prefill can't be captured in a graph; the prefill's graphs (breakable) are off" in caplog.text


@pytest.mark.parametrize("capturing", ["is_in_breakable_cuda_graph", "is_in_tc_piecewise_cuda_graph"])
def test_a_capture_of_the_prefill_is_refused(capturing: str, monkeypatch) -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler

    monkeypatch.setattr(attention_backend_handler, capturing, lambda: True)
    with pytest.raises(Unsupported, match="--disable-prefill-cuda-graph"):
        mla.forward_method(SimpleNamespace(), batch_of((0,), (3,)))


def test_a_prefix_is_never_read_in_the_absorbed_form() -> None:
    asked = runner()
    asked.server_args.disable_chunked_prefix_cache = True
    with pytest.raises(Unsupported, match="--disable-chunked-prefix-cache.*leave it out"):
        selection.create(asked)


def test_absorbed_attention_is_the_engines() -> None:
    with pytest.raises(Unsupported, match="absorbed decode is the engine's: add --decode-attention-backend"):
        selection.create(runner(decode="zyfa"))
    with pytest.raises(Unsupported, match=r"value dimensions \(192, 64, 128\)"):
        selection.create(runner(qk_nope_head_dim=192))
    backend = selection.create(runner())
    absorbed = RadixAttention(HEADS, 576, SCALE, 1, 0, v_head_dim=512)
    q = torch.zeros(1, HEADS, 576, dtype=torch.bfloat16)
    batch = batch_of((0,), (1,))
    backend.init_forward_metadata(batch)
    with pytest.raises(Unsupported, match="not the absorbed form.*Given: 576/512"):
        backend.forward_extend(q, q[:, :1], q[:, :1, :512], absorbed, batch)
    for capture in (
        lambda: backend.init_cuda_graph_state(1, 1),
        lambda: backend.init_forward_metadata_out_graph(batch, in_capture=True),
        lambda: backend.forward_decode(q, q, q, absorbed, batch),
    ):
        with pytest.raises(Unsupported, match="not the absorbed form"):
            capture()
