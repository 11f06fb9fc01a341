"""What ZYFA does not serve in SGLang, told by name when the server starts."""

from __future__ import annotations

from typing import Any

import torch

from zyfa_backend.serving import DTYPES

ACCEPTED_CACHES = {torch.float8_e4m3fn: "fp8_e4m3", **DTYPES}


def runner_reasons(runner: Any) -> list[str]:
    """What of a ModelRunner's model and settings stands against ZYFA, each with its value; empty when it serves."""
    reasons = []
    args = runner.server_args
    if getattr(args, "speculative_algorithm", None) is not None:
        reasons.append(f"speculative decoding ({args.speculative_algorithm})")
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        reasons.append(f"disaggregated serving (--disaggregation-mode {args.disaggregation_mode})")
    if getattr(args, "dllm_algorithm", None) is not None:
        reasons.append(f"diffusion language models (--dllm-algorithm {args.dllm_algorithm})")
    if getattr(args, "dcp_size", 1) not in (None, 1):
        reasons.append(f"decode context parallelism (--dcp-size {args.dcp_size})")
    if getattr(args, "attn_cp_size", 1) not in (None, 1):
        reasons.append(f"context parallelism (--attn-cp-size {args.attn_cp_size})")
    if getattr(args, "enable_two_batch_overlap", False):
        reasons.append("two-batch overlap")
    if getattr(args, "enable_pdmux", False):
        # SGLang makes a backend for each of its streams, and each would find scales of its own for the one cache.
        reasons.append("multiplexed prefill and decode (--enable-pdmux)")
    if runner.dtype not in DTYPES:
        reasons.append(f"dtype {runner.dtype} (supported: {', '.join(DTYPES.values())})")
    if getattr(getattr(runner, "kv_index_translator", None), "is_translating", False):
        reasons.append("the unified memory pool")
    if getattr(runner.model_config, "is_encoder_decoder", False):
        reasons.append("encoder-decoder models")
    model = getattr(runner, "model", None)
    if model is not None:
        names = [name for name, _ in model.named_parameters() if "sink" in name.rsplit(".", 1)[-1]]
        if names:
            reasons.append(f"attention sinks ({names[0]})")
    return reasons


def store_reasons(args: Any) -> list[str]:
    """What keeps K and V outside the token pool, where scales that are found while the server runs don't reach."""
    flags = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv")
    return [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag, False)]


def pool_reasons(pool: Any, mla: bool) -> list[str]:
    """What of a KV pool stands against ZYFA: its kind, its layout, its dtype."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if mla:
        # The latent cache is the engine's to write and to read.
        return [] if isinstance(pool, MLATokenToKVPool) else [f"KV pool {type(pool).__name__} with MLA"]
    parts = [pool]
    if isinstance(pool, SWAKVPool):
        parts = [part for part in (pool.full_kv_pool, pool.swa_kv_pool) if part is not None]
    reasons = []
    for part in parts:
        if type(part) is not MHATokenToKVPool:
            reasons.append(f"KV pool {type(part).__name__} (supported: MHATokenToKVPool, SWAKVPool)")
            continue
        layout = getattr(part, "kv_cache_layout", "nhd")
        if layout != "nhd":
            hint = {
                "vectorized_5d": "; unset SGLANG_AITER_KV_CACHE_LAYOUT",
                "hnd": "; unset SGLANG_USE_HND_KVCACHE",
            }.get(layout, "")
            reasons.append(f"KV cache layout {layout} (supported: nhd{hint})")
        if part.dtype not in ACCEPTED_CACHES:
            accepted = ", ".join(("auto", *ACCEPTED_CACHES.values()))
            reasons.append(f"KV cache dtype {str(part.dtype).removeprefix('torch.')} (supported: {accepted})")
        elif getattr(part, "is_quantized_kv_cache", False):
            reasons.append(f"a KV cache that SGLang quantises itself ({part.quant_method.name})")
    return list(dict.fromkeys(reasons))


def layer_reasons(layer: Any) -> list[str]:
    """What of a RadixAttention layer stands against ZYFA."""
    from sglang.srt.layers.radix_attention import AttentionType

    reasons = []
    if layer.logit_cap:
        reasons.append(f"soft cap {layer.logit_cap}")
    if layer.is_cross_attention:
        reasons.append("cross attention")
    if layer.attn_type != AttentionType.DECODER:
        reasons.append(f"attention type {layer.attn_type.value}")
    if layer.pos_encoding_mode != "NONE":
        reasons.append(f"position encoding {layer.pos_encoding_mode} inside attention")
    if getattr(layer, "use_irope", False):
        reasons.append("chunked local attention")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        reasons.append(f"a temperature by length ({layer.xai_temperature_len})")
    return reasons


def call_reasons(arguments: dict[str, Any]) -> list[str]:
    """What of the extra arguments of a forward call stands against ZYFA, which takes none."""
    names = {"sinks": "attention sinks", "q_rope": "absorbed MLA", "k_rope": "absorbed MLA"}
    given = [name for name, value in arguments.items() if value is not None and value is not False]
    return list(dict.fromkeys(names.get(name, f"the argument {name}") for name in given))
