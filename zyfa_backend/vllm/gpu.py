"""ZYFA on a GPU under vLLM: prefill by ZYFA's kernels, decode over the same cache by the engine's own or by ZYFA's.

The cache has the layout of vLLM's Triton backend. K lies in it rotated, so the engine's decode gets a rotated query.
With int8 K, which the engine's would read as e4m3, decode is ZYFA's, and on GPUs whose own FP8 is e4m3fnuz.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from zyfa_kernels.triton.decode import decode
from zyfa_kernels.triton.prefill import prefill, workspace_bytes
from zyfa_kernels.triton.rotate_quantize import rotate_quantize_q, rotate_quantize_write

from zyfa_backend import dispatch, rotation, settings
from zyfa_backend.device_saturation import DeviceSaturation
from zyfa_backend.device_scales import DeviceScales
from zyfa_backend.serving import QUANTIZED_CACHES, announce, cache_config_for
from zyfa_backend.vllm import start_up
from zyfa_backend.vllm.common import checkpoint_scales, explain_reasons, store_for

LEAST_CAPABILITY = {"cuda": DeviceCapability(8, 9), "rocm": DeviceCapability(9, 4)}


class ZyfaGpuBackend(TritonAttentionBackend):
    """Prefill over a paged cache of rotated K and FP8 V; decode of FP8 K is vLLM's `unified_attention`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = list(QUANTIZED_CACHES)
    # Apart from attention a captured piece may hold the write, and replay it without the calibration of the host.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "ZYFA"

    @staticmethod
    def get_impl_cls() -> type[ZyfaGpuImpl]:
        return ZyfaGpuImpl

    @staticmethod
    def get_builder_cls() -> type[ZyfaGpuMetadataBuilder]:
        return ZyfaGpuMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [qk for qk, v in dispatch.GPU_DIMS if qk == v]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list:
        """Those of the prefill kernel; vLLM cuts larger blocks of its own, which are multiples of 16, into these."""
        return [128, 64, 32, 16]

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        """Whether the matrix units take FP8: Ada, Hopper and later, gfx94x and later."""
        return capability >= LEAST_CAPABILITY["rocm" if current_platform.is_rocm() else "cuda"]

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        # Calibrated scales do not travel with the blocks.
        return False

    @classmethod
    def customize_spec(cls, spec):
        return spec

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str]:
        """Reasons against a layer, each with its value; empty when ZYFA serves it."""
        return explain_reasons(cls, super().validate_configuration(*args, **kwargs), kwargs)


@dataclass
class Prefills:
    """The requests of a step that are prefilled, in the terms of `zyfa_kernels.triton.prefill`."""

    first_token: int
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass
class ZyfaGpuMetadata(TritonAttentionMetadata):
    """One step's batch: decodes come first, with metadata of the engine's own, then prefills."""

    decodes: TritonAttentionMetadata | None = None
    prefills: Prefills | None = None


class ZyfaGpuMetadataBuilder(TritonAttentionMetadataBuilder):
    # Whole-step graphs hold decodes alone; with prefills in the batch, attention runs between the pieces of a graph.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_draft_decode_metadata_update = False
    reorder_batch_threshold: int = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> AttentionCGSupport:
        # vLLM's V1 runner replays a decode's graph for a prompt of one token too, past the calibration.
        return cls._cudagraph_support if vllm_config.use_v2_model_runner else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ZyfaGpuMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise dispatch.Unsupported(f"causal={common.causal!r} is not supported; ZYFA serves causal decoders")
        engine = super().build(common_prefix_len, common, fast_build)
        if common.is_prefilling is not None and (padded := common.num_reqs - common.is_prefilling.shape[0]) > 0:
            # A step that was padded to a graph's size tells it of its real requests alone.
            common = common.replace(is_prefilling=torch.nn.functional.pad(common.is_prefilling, (0, padded)))
        # A last prompt token that is computed alone is still prefill, so that its bits do not depend on how it was
        # chunked; only where the engine replays a whole-step graph for it, which holds decodes, is it none.
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
            common, treat_short_extends_as_decodes=common.is_prefilling is None
        )
        metadata = ZyfaGpuMetadata(**{field.name: getattr(engine, field.name) for field in fields(engine)})
        if decodes:
            metadata.decodes = engine if not prefills else replace(
                engine,
                num_actual_tokens=decode_tokens,
                max_query_len=1,
                query_start_loc=engine.query_start_loc[: decodes + 1],
                seq_lens=engine.seq_lens[:decodes],
                block_table=engine.block_table[:decodes],
            )
        if prefills:
            starts = engine.query_start_loc[decodes:]
            metadata.prefills = Prefills(
                first_token=decode_tokens,
                cu_seqlens_q=starts - decode_tokens if decode_tokens else starts,
                seqlens_k=engine.seq_lens[decodes:],
                block_table=engine.block_table[decodes:],
                max_seqlen_q=engine.max_query_len,
                max_seqlen_k=engine.max_seq_len,
            )
        return metadata


class ZyfaGpuImpl(TritonAttentionImpl):
    """One layer. `self.scale` is the engine's decode's: with the norm that the rotation of its query leaves out."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name,
        )
        self.supports_quant_query_input = False  # it is quantised here, after its rotation
        self.softmax_scale = float(scale)
        self.window = sliding_window - 1 if sliding_window is not None else None
        vllm_config = get_current_vllm_config()
        self.config = cache_config_for(kv_cache_dtype, settings.load().config, vllm_config.cache_config.cache_dtype)
        # What prefill and ZYFA's decode are told alike.
        self._numerics: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "window": self.window,
            "p": self.config.probabilities,
            "qk_format": self.config.qk_format,
            "offset": self.config.offset,
            "delta": self.config.delta,
        }
        self._store = store_for(vllm_config, self.config)
        start_up.watch()
        start_up.key_compiled_graphs()
        self._device = torch.device(vllm_config.device_config.device_type, torch.accelerator.current_device_index())
        self._turn = _unnormalised(head_size, self.config.rotation, vllm_config.model_config.dtype, self._device)
        if self._turn is not None:
            self.scale = self.softmax_scale * head_size**-0.5
        self._kernels = {
            phase: dispatch.select(dispatch.Shape(head_size, head_size, phase, self.config), str(self._device))
            for phase in ("causal", "decode")
        }
        # The engine's decode reads bytes as the FP8 of its platform, which on gfx94x is another than the cache's.
        self._own_decode = self.config.qk_format != "fp8_e4m3" or current_platform.is_fp8_fnuz()
        if self._own_decode:
            decode = dispatch.Shape(head_size, head_size, "decode", self.config)
            self._kernels["decode"] = f"triton/{dispatch.kernel_name(decode)}"
        self._write_kernel = f"triton/rotate-quantize-hd{head_size}"
        sequences, longest = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        self._workspace = workspace_bytes(sequences, longest, num_kv_heads, head_size)
        self._scales: DeviceScales | None = None
        self._saturation: DeviceSaturation | None = None
        announce(
            f"ZYFA serves layers with {num_heads} query and {num_kv_heads} KV heads of {head_size}"
            f"{'' if sliding_window is None else f', window {sliding_window}'}: prefill {self._kernels['causal']}, "
            f"decode {self._kernels['decode']}, cache {kv_cache_dtype}, rotation {self.config.rotation} on "
            f"{self._device}"
        )

    def attach(self, name: str) -> None:
        """Check, at start-up, that the loaded scales know layer `name`. Raises ConfigError."""
        self._store.check(name, self.num_kv_heads)

    def fused_output_quant_supported(self, quant_key) -> bool:
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        """AITER's fusion would write K without its rotation."""
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ZyfaGpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the step's K and V to the cache, then attention over it.

        query [T, Hq, D]; kv_cache [blocks, Hkv, block size, 2·D], K before V; output [T, Hq, D], written in place.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("ZYFA writes no quantised output")
        if attn_metadata is None:
            if start_up.rehearsing():
                # The engine gives the cache what this step leaves free: what a prefill takes must be seen in it.
                torch.empty(self._workspace, dtype=torch.uint8, device=output.device)
            return output.zero_()
        if key is not None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        scales = self._layer_scales(layer)
        if (decodes := attn_metadata.decodes) is not None:
            self._decode(scales, query, key, value, kv_cache, decodes, output)
        if (prefills := attn_metadata.prefills) is not None:
            rows = slice(prefills.first_token, attn_metadata.num_actual_tokens)
            self._prefill(scales, query[rows], kv_cache, prefills, output[rows])
            self._layer_saturation(layer).look()
        return output

    def _decode(self, scales: DeviceScales, query, key, value, kv_cache, decodes, output) -> None:
        """The first tokens of the step, one a request; of a batch that a graph was padded to, some have no keys."""
        tokens = decodes.num_actual_tokens
        if not self._own_decode:
            turned = query[:tokens] if self._turn is None else query[:tokens] @ self._turn
            engine = SimpleNamespace(_q_scale=None, _k_scale=scales.k, _v_scale=scales.v)
            super().forward(engine, turned, key, value, kv_cache, decodes, output[:tokens])
        else:
            query = query[:tokens]
            codes, q_scale = rotate_quantize_q(query, rotation=self.config.rotation, qk_format=self.config.qk_format)
            k_cache, v_cache = self._halves(kv_cache)
            # A graph is captured with the longest that the model serves, so that it holds for every step.
            decode(
                codes, q_scale, k_cache, v_cache, scales.k, scales.v,
                seqlens_k=decodes.seq_lens[:tokens],
                block_table=decodes.block_table[:tokens],
                max_seqlen_k=decodes.max_seq_len,
                out=output[:tokens].view(query.shape),
                **self._numerics,
            )  # fmt: skip
        dispatch.counters.add(self._kernels["decode"], tokens)

    def _prefill(self, scales: DeviceScales, query, kv_cache, prefills: Prefills, output) -> None:
        codes, q_scale = rotate_quantize_q(query, rotation=self.config.rotation, qk_format=self.config.qk_format)
        k_cache, v_cache = self._halves(kv_cache)
        prefill(
            codes, q_scale, k_cache, v_cache, scales.k, scales.v,
            cu_seqlens_q=prefills.cu_seqlens_q,
            seqlens_k=prefills.seqlens_k,
            block_table=prefills.block_table,
            max_seqlen_q=prefills.max_seqlen_q,
            max_seqlen_k=prefills.max_seqlen_k,
            causal=True,
            out=output.view(query.shape),
            **self._numerics,
        )  # fmt: skip
        dispatch.counters.add(self._kernels["causal"], query.shape[0])

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate K, quantise both and write them at `slot_mapping` [T]; slot -1 is skipped.

        Saturated values are counted on the device, and reported by later prefills.
        """
        tokens = slot_mapping.shape[0]
        key, value = key[:tokens], value[:tokens]
        scales = self._layer_scales(layer)
        saturation = self._layer_saturation(layer)
        if not start_up.rehearsing():
            saturation.begin()
            if not scales.frozen:
                scales.offer(key, value, slot_mapping)
        k_cache, v_cache = self._halves(kv_cache)
        rotate_quantize_write(
            key, value, k_cache, v_cache, slot_mapping, scales.k, scales.v, rotation=self.config.rotation,
            qk_format=self.config.qk_format, saturated=saturation.counts,
        )  # fmt: skip
        dispatch.counters.add(self._write_kernel, tokens)

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V bytes as [blocks, block size, Hkv, D] views; int8 codes of K are bytes to the kernels as well."""
        k, v = kv_cache.view(torch.uint8).transpose(1, 2).split(self.head_size, dim=-1)
        return k, v

    def _layer_scales(self, layer) -> DeviceScales:
        if self._scales is None:
            known = checkpoint_scales(layer)
            self._scales = DeviceScales(self._store, layer.layer_name, self.num_kv_heads, known, self._device)
        return self._scales

    def _layer_saturation(self, layer) -> DeviceSaturation:
        if self._saturation is None:
            self._saturation = DeviceSaturation(layer.layer_name, self._device)
        return self._saturation


def _unnormalised(dim: int, kind: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """The rotation times sqrt(D): ones and minus ones, exact in any dtype. None where nothing is rotated."""
    if kind == "none":
        return None
    return (rotation.matrix(dim, kind, torch.float64) * dim**0.5).round().to(dtype).to(device)
