"""What ZYFA's vLLM backends for CPUs and for GPUs share."""

from __future__ import annotations

import weakref

import torch

from zyfa_backend.config import AttentionConfig
from zyfa_backend.scales import ScaleStore
from zyfa_backend.serving import DTYPES, new_store

# The stores of living engines: two engines of one process must not share scales.
_stores: list[tuple[weakref.ref, dict[AttentionConfig, ScaleStore]]] = []


def store_for(vllm_config, config: AttentionConfig) -> ScaleStore:
    """The scale store of the engine that `vllm_config` belongs to. Reads ZYFA_SCALES; raises ConfigError."""
    _stores[:] = [(ref, stores) for ref, stores in _stores if ref() is not None]
    mine = next((stores for ref, stores in _stores if ref() is vllm_config), None)
    if mine is None:
        mine = {}
        _stores.append((weakref.ref(vllm_config), mine))
    if config not in mine:
        parallel = vllm_config.parallel_config
        ranks = {"tensor parallel": parallel.tensor_parallel_size, "pipeline": parallel.pipeline_parallel_size}
        mine[config] = new_store(config, ranks)
    return mine[config]


def checkpoint_scales(layer: torch.nn.Module) -> tuple[float, float] | None:
    """Per-tensor (k, v) scales that the checkpoint brought; None where vLLM left its default of 1."""
    k, v = float(layer._k_scale_float), float(layer._v_scale_float)  # type: ignore[arg-type]
    return None if k == v == 1.0 else (k, v)


def explain_reasons(backend, reasons: list[str], given: dict) -> list[str]:
    """vLLM's reasons against a layer with the values at fault and what would be accepted."""
    head_sizes = ", ".join(map(str, backend.get_supported_head_sizes()))
    dtypes = ", ".join(DTYPES[dtype] for dtype in backend.supported_dtypes)
    caches = ", ".join(backend.supported_kv_cache_dtypes)
    detail = {
        "head_size not supported": f"head size {given.get('head_size')} (supported: {head_sizes})",
        "kv_cache_dtype not supported": f"kv_cache_dtype {given.get('kv_cache_dtype')} (supported: {caches})",
        "dtype not supported": f"dtype {given.get('dtype')} (supported: {dtypes})",
    }
    if (capability := given.get("device_capability")) is not None:
        fp8 = "8.9 and later, on ROCm 9.4 and later: the kernels need FP8 matrix units"
        detail["compute capability not supported"] = (
            f"compute capability {capability.major}.{capability.minor} (supported: {fp8})"
        )
    if "attn_type" in given:
        kind = str(given["attn_type"]).removeprefix("AttentionType.").lower()
        detail[f"attention type {given['attn_type']} not supported"] = f"attention type {kind}"
    return [detail.get(reason, reason) for reason in reasons]
