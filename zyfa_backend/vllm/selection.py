"""Which layers ZYFA serves, which it refuses by name, and which it leaves to the engine when asked to."""

from __future__ import annotations

import functools
import inspect
import logging

from zyfa_backend import settings
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.vllm.registration import selected, selected_for

logger = logging.getLogger("vllm.zyfa")

# Key of VllmConfig.additional_config under which a preset for MLA's prefill travels to the workers.
MLA_CONFIG = "zyfa_mla_config"
_FALLBACK_HINT = "ZYFA_FALLBACK=1 leaves such layers to the engine's own backend"


def get_attn_backend_cls(original, selected_backend, attn_selector_config, num_heads=None):
    """Wraps Platform.get_attn_backend_cls: returns the class path of the backend for one kind of layer."""
    if not selected(selected_backend):
        return original(selected_backend, attn_selector_config=attn_selector_config, num_heads=num_heads)
    if attn_selector_config.use_mla:
        # Decode and the latent cache stay the engine's; ZYFA supplies the prefill.
        return original(None, attn_selector_config=attn_selector_config, num_heads=num_heads)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionBackend

    if not current_platform.is_cpu() and unquantised_on_gpu(attn_selector_config.kv_cache_dtype):
        _log_once(
            f"ZYFA: --kv-cache-dtype {attn_selector_config.kv_cache_dtype} quantises nothing, and ZYFA has no such "
            "kernel on a GPU: the engine's backend serves these layers; --kv-cache-dtype fp8 selects ZYFA's"
        )
        return original(None, attn_selector_config=attn_selector_config, num_heads=num_heads)
    backend = backend_class()
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    given = {k: v for k, v in attn_selector_config._asdict().items() if k in known}
    capability = None if current_platform.is_cpu() else current_platform.get_device_capability()
    reasons = backend.validate_configuration(**given, device_capability=capability) + engine_reasons()
    if not reasons:
        return f"{backend.__module__}.{backend.__qualname__}"
    leave_or_refuse(reasons, f"layers with {_summary(attn_selector_config)}")
    return original(None, attn_selector_config=attn_selector_config, num_heads=num_heads)


def get_mla_prefill_backend_cls(original, mla_selector_config):
    """Wraps Platform.get_mla_prefill_backend_cls: ZYFA's prefill for MLA, or the engine's."""
    from vllm.config import get_current_vllm_config_or_none

    if not selected_for(get_current_vllm_config_or_none(), "mla_attention"):
        return original(mla_selector_config)
    from vllm.platforms import current_platform

    from zyfa_backend.vllm.mla import ZyfaMLAPrefillBackend, mla_config_for

    if not current_platform.is_cpu() and not mla_config_for(get_current_vllm_config_or_none()).quantized:
        _log_once("ZYFA: unquantised MLA prefill is the engine's on a GPU; --kv-cache-dtype fp8 selects ZYFA's")
        return original(mla_selector_config)
    reasons = ZyfaMLAPrefillBackend.validate_configuration(None, mla_selector_config) + engine_reasons()
    if not reasons:
        return ZyfaMLAPrefillBackend
    leave_or_refuse(reasons, f"MLA layers with dimensions {mla_selector_config.mla_dimensions}")
    return original(mla_selector_config)


def check_and_update_config(original, vllm_config):
    """Wraps Platform.check_and_update_config: on a CPU, an FP8 cache asked for with MLA becomes FP8 prefill.

    The engine's CPU decode reads a latent cache of the model's dtype alone, and would otherwise cast to bytes.
    """
    _forget_earlier_choices()
    model, cache = vllm_config.model_config, vllm_config.cache_config
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if on_cpu and model is not None and model.use_mla and selected_for(vllm_config, "mla_attention"):
        from zyfa_backend.serving import QUANTIZED_CACHES

        if cache.cache_dtype not in ("auto", "float16", "bfloat16", *QUANTIZED_CACHES):
            accepted = ", ".join(("auto", *QUANTIZED_CACHES))
            raise Unsupported(f"kv_cache_dtype {cache.cache_dtype} is not supported with MLA; accepted: {accepted}")
        if cache.cache_dtype in QUANTIZED_CACHES:
            if not isinstance(vllm_config.additional_config, dict):
                raise Unsupported("additional_config is not a dictionary; ZYFA needs one for FP8 prefill with MLA")
            vllm_config.additional_config.setdefault(MLA_CONFIG, "lean")
            cache.cache_dtype = "auto"
            logger.warning(
                "ZYFA: --kv-cache-dtype fp8 with MLA on a CPU quantises the prefill; the latent cache stays in the "
                "model's dtype, the only one that the engine's CPU decode reads."
            )
    return original(vllm_config)


def _forget_earlier_choices() -> None:
    """vLLM remembers a backend by its own arguments, among which is no environment variable."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.mla.prefill import selector as mla_selector

    selector._cached_get_attn_backend.cache_clear()
    mla_selector._auto_select_mla_prefill_backend.cache_clear()


def wrap_attention_layer() -> None:
    """Check what the platform's selector is not told: ALiBi, soft cap, shared caches, chunked local attention."""
    from vllm.model_executor.layers.attention import Attention

    original = Attention.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        from vllm.config import get_current_vllm_config_or_none

        if not _any_selected(get_current_vllm_config_or_none()):
            original(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        reasons = layer_reasons(given)
        backend = given.get("attn_backend")
        if backend is not None and not issubclass(backend, backend_class()):
            reasons = []
        if reasons and backend is not None:
            # The engine's plain backend would ignore what the derived one adds, such as a chunk's mask.
            raise Unsupported(f"ZYFA does not serve layers with {'; '.join(reasons)}; choose another backend")
        if reasons:
            leave_or_refuse(reasons, f"layers with head size {given['head_size']}")
            given["attn_backend"] = _engine_backend(given)
        original(*bound.args, **bound.kwargs)
        if isinstance(self.impl, backend_class().get_impl_cls()):
            self.impl.attach(self.layer_name)

    Attention.__init__ = init


def engine_reasons() -> list[str]:
    """What ZYFA does not support of the engine that is being built, whatever its layers are."""
    from vllm.config import get_current_vllm_config_or_none

    speculative = getattr(get_current_vllm_config_or_none(), "speculative_config", None)
    return [] if speculative is None else [f"speculative decoding ({speculative.method})"]


def layer_reasons(given: dict) -> list[str]:
    """What ZYFA does not support among the arguments of an Attention layer, by name."""
    reasons = []
    if given.get("alibi_slopes") is not None or given.get("use_alibi_sqrt"):
        reasons.append("ALiBi")
    if given.get("logits_soft_cap"):
        reasons.append(f"soft cap {given['logits_soft_cap']}")
    if given.get("kv_sharing_target_layer_name") is not None:
        reasons.append("a KV cache shared between layers")
    extra = given.get("extra_impl_args", {})
    if extra.get("chunk_lookback", -1) > -1:
        reasons.append("chunked attention with lookback")
    backend = given.get("attn_backend")
    if backend is not None and issubclass(backend, backend_class()) and backend is not backend_class():
        reasons.append(f"a derived backend {backend.__name__}")
    if given.get("head_size_v") not in (None, given["head_size"]):
        reasons.append(f"value head size {given['head_size_v']} beside head size {given['head_size']}")
    return reasons


def leave_or_refuse(reasons: list[str], what: str) -> None:
    """Refuse `what` with its reasons, or log that the engine's backend serves it when ZYFA_FALLBACK=1."""
    text = "; ".join(reasons)
    if not settings.load().fallback:
        raise Unsupported(f"ZYFA does not serve {what}: {text}. {_FALLBACK_HINT}")
    _log_once(f"ZYFA_FALLBACK: the engine's backend serves {what}: {text}")


@functools.cache
def _log_once(line: str) -> None:
    logger.warning(line)


def backend_class():
    """ZYFA's backend for the platform that this process runs on."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from zyfa_backend.vllm.backend import ZyfaAttentionBackend

        return ZyfaAttentionBackend
    from zyfa_backend.vllm.gpu import ZyfaGpuBackend

    return ZyfaGpuBackend


def unquantised_on_gpu(kv_cache_dtype: str) -> bool:
    """Whether a layer with this cache asks for no quantisation at all, which only ZYFA on a CPU computes itself."""
    from zyfa_backend.serving import QUANTIZED_CACHES

    chosen = settings.load().config
    return kv_cache_dtype not in QUANTIZED_CACHES and (chosen is None or not chosen.quantized)


def _any_selected(vllm_config) -> bool:
    if vllm_config is None:
        return selected(None)
    attention = vllm_config.attention_config
    return any(selected(backend) for backend in (attention.backend, *(attention.backend_per_kind or {}).values()))


def _engine_backend(given: dict):
    """The class that the platform would take for this layer without ZYFA."""
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    cache = given.get("cache_config")
    config = AttentionSelectorConfig(
        head_size=given["head_size"],
        dtype=torch.get_default_dtype(),
        kv_cache_dtype=cache.cache_dtype if cache else "auto",
        block_size=None,
        has_sink=given.get("extra_impl_args", {}).get("sinks") is not None,
        attn_type=given.get("attn_type", "decoder"),
        has_sliding_window=(given.get("per_layer_sliding_window") or (cache and cache.sliding_window)) is not None,
        use_non_causal=get_current_vllm_config().attention_config.use_non_causal,
    )
    platform = type(current_platform)
    original = platform.get_attn_backend_cls.__wrapped__
    return resolve_obj_by_qualname(original(None, attn_selector_config=config, num_heads=None))


def _summary(config) -> str:
    parts = [f"head size {config.head_size}", f"{config.dtype}".replace("torch.", "")]
    parts.append(f"cache {config.kv_cache_dtype}")
    if config.attn_type != "decoder":
        parts.append(f"type {str(config.attn_type).removeprefix('AttentionType.').lower()}")
    return ", ".join(parts)
