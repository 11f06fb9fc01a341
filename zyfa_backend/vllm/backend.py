"""ZYFA as a vLLM attention backend: what it supports, its metadata, and the layer implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from zyfa_backend import dispatch, reference, settings
from zyfa_backend.cpu import fused_cache
from zyfa_backend.quantization import Quantized, quantize_kv, quantize_q
from zyfa_backend.rotation import rotate
from zyfa_backend.serving import (
    DTYPES,
    QUANTIZED_CACHES,
    announce,
    cache_config_for,
    report_saturation,
)
from zyfa_backend.vllm.common import checkpoint_scales, explain_reasons, store_for
from zyfa_backend.vllm.kernel_scan import hide_llvmlite

hide_llvmlite()


class ZyfaAttentionBackend(AttentionBackend):
    """Prefill and decode over a paged cache of rotated FP8 (or int8) K and FP8 V, or of the model's dtype."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16", *QUANTIZED_CACHES]

    @staticmethod
    def get_name() -> str:
        return "ZYFA"

    @staticmethod
    def get_impl_cls() -> type[ZyfaAttentionImpl]:
        return ZyfaAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[ZyfaMetadataBuilder]:
        return ZyfaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(dispatch.HEAD_DIMS)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A head's keys lie together; the CPU backend that may serve other layers has the same layout.
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        # Calibrated scales do not travel with the blocks.
        return False

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str]:
        """Reasons against a layer, each with its value; empty when ZYFA serves it."""
        return explain_reasons(cls, super().validate_configuration(*args, **kwargs), kwargs)


@dataclass
class ZyfaMetadata:
    """One step's batch, in host numbers, shared by every layer of a cache group.

    prefills: (query start, query end, sequence length, row of the block table) of each request that is prefilled.
    decode_tokens, decode_lengths, decode_blocks: query token, sequence length and blocks of each request that decodes.
    """

    num_actual_tokens: int
    block_table: torch.Tensor
    prefills: list[tuple[int, int, int, int]]
    decode_tokens: torch.Tensor
    decode_lengths: list[int]
    decode_blocks: torch.Tensor


class ZyfaMetadataBuilder(AttentionMetadataBuilder[ZyfaMetadata]):
    def __init__(self, kv_cache_spec: AttentionSpec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ZyfaMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise dispatch.Unsupported(f"causal={common.causal!r} is not supported; ZYFA serves causal decoders")
        starts = common.query_start_loc_cpu.tolist()
        lengths = common.seq_lens.tolist()
        # A last prompt token that is computed alone is still prefill: its bits must not depend on how it was chunked.
        prefilling = common.is_prefilling.tolist() if common.is_prefilling is not None else [False] * len(lengths)
        prefills, rows = [], []
        for row in range(common.num_reqs):
            start, end = starts[row], starts[row + 1]
            if end - start == 1 and not prefilling[row]:
                rows.append(row)
            elif end > start:
                prefills.append((start, end, lengths[row], row))
        block_table = common.block_table_tensor
        return ZyfaMetadata(
            num_actual_tokens=common.num_actual_tokens,
            block_table=block_table,
            prefills=prefills,
            decode_tokens=torch.tensor([starts[row] for row in rows], dtype=torch.long),
            decode_lengths=[lengths[row] for row in rows],
            decode_blocks=block_table[torch.tensor(rows, dtype=torch.long)],
        )


class ZyfaAttentionImpl(AttentionImpl[ZyfaMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        from vllm.config import get_current_vllm_config

        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        # vLLM counts the query's own key among the window's; flash-attn's left window does not.
        self.window = sliding_window - 1 if sliding_window is not None else None
        vllm_config = get_current_vllm_config()
        engine_dtype = vllm_config.cache_config.cache_dtype
        self.config = cache_config_for(kv_cache_dtype, settings.load().config, engine_dtype)
        self._store = store_for(vllm_config, self.config)
        device = vllm_config.device_config.device_type
        dtype = DTYPES[vllm_config.model_config.dtype]
        self._kernels = {
            phase: dispatch.select(dispatch.Shape(head_size, head_size, phase, self.config, dtype), device)
            for phase in ("causal", "decode")
        }
        # The reference's decode in loops over this cache's layout.
        self._kernels["decode"] = self._kernels["decode"].replace("torch/", "numba/")
        fused_cache.compile_for(torch.uint8 if self.config.quantized else vllm_config.model_config.dtype, self.config)
        self._write_kernel = f"{'numba/rotate-quantize' if self.config.quantized else 'torch/write'}-hd{head_size}"
        announce(
            f"ZYFA serves layers with {num_heads} query and {self.num_kv_heads} KV heads of {head_size}"
            f"{'' if sliding_window is None else f', window {sliding_window}'}: prefill {self._kernels['causal']}, "
            f"decode {self._kernels['decode']}, cache {kv_cache_dtype}, rotation {self.config.rotation} on {device}"
        )

    def attach(self, name: str) -> None:
        """Check, at start-up, that the loaded scales know layer `name`. Raises ConfigError."""
        if self.config.quantized:
            self._store.check(name, self.num_kv_heads)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ZyfaMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the cache, which `do_kv_cache_update` has already written.

        query [T, Hq, D]; kv_cache [blocks, Hkv, block size, 2·D], K before V; output [T, Hq, D], written in place.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("ZYFA writes no quantised output")
        if attn_metadata is None:
            return output.zero_()
        for start, end, length, row in attn_metadata.prefills:
            blocks = attn_metadata.block_table[row]
            self._prefill(layer, query[start:end], kv_cache, blocks, length, output[start:end])
        if attn_metadata.decode_lengths:
            self._decode(layer, query, kv_cache, attn_metadata, output)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate K, quantise both and write them at `slot_mapping` [T]; slot -1 is skipped."""
        slots = slot_mapping.long()
        key, value = key[: slots.shape[0]], value[: slots.shape[0]]
        if self.config.quantized:
            written = self._write_quantized(layer, key, value, kv_cache, slots)
        else:
            written = self._write(key, value, kv_cache, slots)
        if written:
            dispatch.counters.add(self._write_kernel, written)

    def _write(self, key, value, kv_cache, slots) -> int:
        """Write K and V in the cache's dtype; returns how many tokens."""
        live = slots >= 0
        slots, key, value = slots[live], key[live], value[live]
        self._store.finite = self._store.finite and bool(torch.isfinite(key.sum() + value.sum()))
        if self.config.rotation != "none":
            key = quantize_kv(key, 1.0, "none", self.config.rotation)
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
        k_cache[block, offset] = key.to(k_cache.dtype)
        v_cache[block, offset] = value.to(v_cache.dtype)
        return slots.numel()

    def _write_quantized(self, layer, key, value, kv_cache, slots) -> int:
        """Rotate K, quantise and write both, calibrating scales that are still open; returns how many tokens."""
        store = self._store
        scales = store.layer(layer.layer_name, self.num_kv_heads, checkpoint_scales(layer))
        if not scales.frozen:
            live = slots >= 0
            if not bool(live.any()):
                return 0
            store.calibrate(layer.layer_name, rotate(key[live], self.config.rotation), value[live])
        written, lost, odd = fused_cache.write(
            key, value, kv_cache, slots, k_scale=scales.k, v_scale=scales.v, config=self.config
        )
        store.finite = store.finite and not odd
        if lost:
            report_saturation(layer.layer_name, lost, key.numel() + value.numel())
        return written

    def _layer_scales(self, layer) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.config.quantized:
            one = torch.ones(self.num_kv_heads, dtype=torch.float32)
            return one, one
        scales = self._store.layer(layer.layer_name, self.num_kv_heads, checkpoint_scales(layer))
        return scales.k, scales.v

    def _prefill(self, layer, query, kv_cache, blocks, length: int, output) -> None:
        context = length - query.shape[0]
        first = 0 if self.window is None else max(0, context - self.window)
        k_scale, v_scale = self._layer_scales(layer)
        k, v = gather(kv_cache, blocks, first, length).split(self.head_size, dim=-1)
        k = k.view(torch.int8) if self.config.qk_format == "int8" else k
        out, _ = reference.attend(
            quantize_q(query, self.config),
            Quantized(k, k_scale, self.config.qk_format),
            Quantized(v, v_scale, self.config.v_format),
            softmax_scale=self.scale,
            causal=True,
            window=self.window,
            context=context,
            config=self.config,
            out_dtype=output.dtype,
            weights=fused_cache.weights,
        )
        output.copy_(out)
        dispatch.counters.add(self._kernels["causal"], query.shape[0])

    def _decode(self, layer, query, kv_cache, metadata: ZyfaMetadata, output) -> None:
        tokens = metadata.decode_tokens
        k_scale, v_scale = self._layer_scales(layer)
        output[tokens] = fused_cache.decode(
            query[tokens],
            kv_cache,
            metadata.decode_blocks,
            metadata.decode_lengths,
            k_scale=k_scale,
            v_scale=v_scale,
            softmax_scale=self.scale,
            window=self.window,
            config=self.config,
            finite=self._store.finite,
        )
        dispatch.counters.add(self._kernels["decode"], len(metadata.decode_lengths))


def gather(kv_cache: torch.Tensor, blocks: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """Tokens of one sequence out of `kv_cache` [blocks, Hkv, block size, 2·D]: [length, Hkv, 2·D], as stored.

    Zeros stand before the block of token `first`, since the engine may have freed those blocks.
    """
    size = kv_cache.shape[2]
    start = first // size
    held = kv_cache.index_select(0, blocks[start : -(-length // size)]).transpose(1, 2).flatten(0, 1)
    if not start:
        return held[:length]
    out = held.new_zeros(length, *held.shape[1:])
    out[start * size :] = held[: length - start * size]
    return out
