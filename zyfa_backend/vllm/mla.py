"""MLA prefill (192/128) for DeepSeek-V2 and its kin; decode and the latent cache stay the engine's."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from zyfa_backend import dispatch, reference, settings
from zyfa_backend.config import UNQUANTIZED, AttentionConfig, parse
from zyfa_backend.contiguous import attend
from zyfa_backend.serving import DTYPES, QUANTIZED_CACHES, announce
from zyfa_backend.vllm.selection import MLA_CONFIG


def mla_config_for(vllm_config) -> AttentionConfig:
    """ZYFA_CONFIG where it is set; otherwise lean when an FP8 cache was asked for, else no quantisation."""
    if (chosen := settings.load().config) is not None:
        return chosen
    additional = vllm_config.additional_config
    if isinstance(additional, dict) and MLA_CONFIG in additional:
        return parse(additional[MLA_CONFIG])
    return parse("lean") if vllm_config.cache_config.cache_dtype in QUANTIZED_CACHES else UNQUANTIZED


class ZyfaMLAPrefillBackend(MLAPrefillBackend):
    """Receives q [T, H, 192], k [T, H, 192] and v [T, H, 128] of the model's dtype and quantises them itself.

    K and V are scaled per head by their own maximum, so no calibration is needed: on a CPU that of the request, on a
    GPU that of all requests of a call. No request's NaN reaches another. LSE is natural, [H, T].
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    ]

    @staticmethod
    def get_name() -> str:
        return "ZYFA"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.config = mla_config_for(self.vllm_config)
        device = self.vllm_config.device_config.device_type
        dtype = DTYPES[self.vllm_config.model_config.dtype]
        qk_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self._kernels = {
            phase: dispatch.select(dispatch.Shape(qk_dim, self.v_head_dim, phase, self.config, dtype), device)
            for phase in ("causal", "full")
        }
        announce(
            f"ZYFA serves MLA prefill with {self.num_heads} heads of {qk_dim}/{self.v_head_dim}: new tokens "
            f"{self._kernels['causal']}, context {self._kernels['full']}, rotation {self.config.rotation}; "
            f"decode is the engine's"
        )

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        """Causal attention of the new tokens among themselves, per request."""
        if output_scale is not None:
            raise NotImplementedError("ZYFA writes no quantised output")
        starts, longest = self._prefill_metadata.query_start_loc, self._prefill_metadata.max_query_len
        result, lse = self._run(q, k, v, starts, starts, (longest, longest), "causal")
        if out is not None:
            out.copy_(result)
            result = out
        return (result, lse) if return_softmax_lse else result

    def run_prefill_context_chunk(self, chunk, q, k, v, out=None):
        """Attention of the new tokens to one chunk of cached context, without a mask."""
        longest = (chunk.max_query_len, chunk.max_seq_len)
        result, lse = self._run(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, longest, "full")
        if out is not None:
            out.copy_(result)
            result = out
        return result, lse

    def _run(self, q, k, v, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, longest, phase: str):
        """(out, lse). longest: the most queries and keys of a request, as the host knows them."""
        if q.device.type != "cpu":
            dispatch.counters.add(self._kernels[phase], q.shape[0])
            return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, self.scale, phase == "causal", self.config)
        tokens, keys = int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])
        dispatch.counters.add(self._kernels[phase], tokens)
        return reference.attention(
            q[:tokens],
            k[:keys],
            v[:keys],
            softmax_scale=self.scale,
            causal=phase == "causal",
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            config=self.config,
        )
