"""MLA's prefill (192/128, DeepSeek-V2 and its kin) in SGLang; latent cache and absorbed decode stay the engine's."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from zyfa_backend import dispatch, reference, settings
from zyfa_backend.config import LEAN, UNQUANTIZED, AttentionConfig
from zyfa_backend.contiguous import attend
from zyfa_backend.dispatch import MLA_DIMS, Unsupported
from zyfa_backend.serving import DTYPES, announce
from zyfa_backend.sglang import NAME
from zyfa_backend.sglang.batch import Batch, read_batch
from zyfa_backend.sglang.checks import ACCEPTED_CACHES, call_reasons
from zyfa_backend.sglang.selection import decode_name

_ABSORBED = (
    "ZYFA serves MLA's prefill as attention of 192/128 channels a head and not the absorbed form; choose a "
    "--decode-attention-backend of the engine and leave graphs of the prefill off (--disable-prefill-cuda-graph)"
)

logger = logging.getLogger("sglang.zyfa")


def register_handler() -> None:
    """Tell SGLang's MLA layers how to hand their prefill to zyfa: K and V of each head, not absorbed. Idempotent."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    AttentionBackendRegistry.register(NAME, forward_method)


def forward_method(attention: Any, forward_batch: Any) -> Any:
    """The AttnForwardMethod of an MLA layer for this batch.

    New tokens alone, all tokens in one call while the expanded K and V of the prefix fit SGLang's bound, or the prefix
    chunk by chunk; absorbed for everything but extend, which is then the engine's.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    if handlers.is_in_breakable_cuda_graph() or handlers.is_in_tc_piecewise_cuda_graph():
        raise Unsupported(_ABSORBED)
    methods = handlers.AttnForwardMethod
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return handlers._dispatch_mla_subtype(attention, forward_batch)
    prefix = forward_batch.extend_prefix_lens_cpu
    if prefix is None or not any(prefix):
        return methods.MHA
    # Partial results are merged by a kernel of the engine's that needs a GPU.
    on_cpu = forward_batch.seq_lens.device.type == "cpu"
    if on_cpu or int(sum(forward_batch.seq_lens_cpu)) <= forward_batch.get_max_chunk_capacity():
        return methods.MHA_ONE_SHOT
    return methods.MHA_CHUNKED_KV


def keep_prefill_eager() -> None:
    """Turn SGLang's graphs of the prefill off, as SGLang does for models that it knows not to fit them.

    The tokens of the expanded prefix change with every batch, which no captured prefill can follow.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec

    try:
        config = get_exec().graph.cuda_graph_config
    except ValueError:  # no server has published one
        return
    if config is not None and config.prefill.backend != Backend.DISABLED:
        logger.warning(
            "ZYFA: MLA's prefill can't be captured in a graph; the prefill's graphs (%s) are off",
            config.prefill.backend,
        )
        config.prefill.backend = Backend.DISABLED


def mla_config(cache: str) -> AttentionConfig:
    """ZYFA_CONFIG where it is set; otherwise lean when an FP8 cache was asked for, else no quantisation."""
    return settings.load().config or (LEAN if cache == "fp8_e4m3" else UNQUANTIZED)


class ZyfaMLABackend(AttentionBackend):
    """Receives q [T, H, 192], k [T, H, 192] and v [T, H, 128] of the model's dtype and quantises them itself.

    K and V are scaled per head by their own maximum, so no calibration is needed: on a CPU that of the request, on a
    GPU that of all requests of a call. No request's NaN reaches another. runner, kernels: as for `ZyfaAttnBackend`.
    Raises Unsupported.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, kernels: str | None = None) -> None:
        super().__init__()
        if decode_name(runner) == NAME:
            raise Unsupported(
                "MLA's absorbed decode is the engine's: add --decode-attention-backend with triton, aiter, fa3, "
                "flashinfer or, on a CPU, torch_native"
            )
        if getattr(runner.server_args, "disable_chunked_prefix_cache", False):
            raise Unsupported(
                "--disable-chunked-prefix-cache, with which SGLang reads a prefix in the absorbed form; leave it out"
            )
        self.device = str(runner.device)
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.kv_cache_dtype = self.data_type = runner.kv_cache_dtype
        self.forward_metadata: Batch | None = None
        cache = ACCEPTED_CACHES.get(runner.kv_cache_dtype, str(runner.kv_cache_dtype).removeprefix("torch."))
        self.config = mla_config(cache)
        model = runner.model_config
        nope, rope = getattr(model, "qk_nope_head_dim", None), getattr(model, "qk_rope_head_dim", None)
        dims = (nope, rope, getattr(model, "v_head_dim", None))
        if dims != (128, 64, 128):
            raise Unsupported(f"MLA with nope, rope and value dimensions {dims} (supported: (128, 64, 128))")
        self.triton = (kernels or ("torch" if self.device.startswith("cpu") else "triton")) == "triton"
        if self.triton and not self.config.quantized:
            raise Unsupported(
                "MLA's prefill without quantisation has no kernel on a GPU; add --kv-cache-dtype fp8_e4m3 or set "
                "ZYFA_CONFIG=lean, which leaves the latent cache as it is"
            )
        if self.triton and runner.dtype not in (torch.bfloat16, torch.float16):
            raise Unsupported(f"dtype {DTYPES[runner.dtype]} on a GPU (supported: bf16, fp16)")
        self._kernels = {
            phase: dispatch.select(
                dispatch.Shape(*MLA_DIMS, phase, self.config, DTYPES[runner.dtype]), "cuda" if self.triton else "cpu"
            )
            for phase in ("causal", "full")
        }
        self._starts: dict[str, torch.Tensor] = {}
        keep_prefill_eager()
        register_handler()
        announce(
            f"ZYFA serves MLA prefill with heads of 192/128: new tokens {self._kernels['causal']}, context chunks "
            f"{self._kernels['full']}, rotation {self.config.rotation}; decode {decode_name(runner)}, the engine's"
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            raise Unsupported(_ABSORBED)
        self.forward_metadata = read_batch(forward_batch)
        self._starts.clear()
        if self.device.startswith("cpu") and not forward_batch.forward_mode.is_decode_or_idle():
            # SGLang lists them by a kernel that needs a GPU, unless they are there.
            table = self.req_to_token_pool.req_to_token
            slots = [table[row, :length] for _, _, length, row in self.forward_metadata.extends]
            forward_batch.mha_one_shot_kv_indices = torch.cat(slots) if slots else None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise Unsupported(_ABSORBED)

    def support_triton(self) -> bool:
        return not self.device.startswith("cpu")

    def forward_decode(self, *_: Any, **__: Any) -> torch.Tensor:
        raise Unsupported(_ABSORBED)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the new tokens to k and v, which are the new tokens', all tokens' or a chunk's of the prefix.

        Returns [T, H · 128] and, where SGLang is to merge results, (out [T, H, 128], lse fp32 [T, H], natural).
        Raises Unsupported for the absorbed form.
        """
        if reasons := call_reasons(kwargs):
            raise Unsupported(f"ZYFA does not serve {'; '.join(reasons)}")
        if (layer.qk_head_dim, layer.v_head_dim) != MLA_DIMS or layer.logit_cap or save_kv_cache:
            raise Unsupported(
                f"{_ABSORBED}. Given: {layer.qk_head_dim}/{layer.v_head_dim}, soft cap {layer.logit_cap}, "
                f"save_kv_cache {save_kv_cache}"
            )
        batch = self.forward_metadata
        assert batch is not None
        new = [end - start for start, end, _, _ in batch.extends]
        chunk = bool(forward_batch.attn_attend_prefix_cache)
        if chunk:
            # Of every request, also one without a prefix, which has no key here.
            keys = forward_batch.prefix_chunk_seq_lens_cpu[forward_batch.prefix_chunk_idx].tolist()
        elif getattr(forward_batch, "mha_one_shot", False):
            keys = [length for _, _, length, _ in batch.extends]  # of which the new ones are a part
        else:
            keys = new
        phase = "full" if chunk else "causal"
        heads = layer.tp_q_head_num
        query = q.reshape(-1, heads, layer.qk_head_dim)
        out = query.new_zeros(query.shape[0], heads, layer.v_head_dim)
        lse = torch.full((query.shape[0], heads), -torch.inf, dtype=torch.float32, device=query.device)
        form = f"chunk {forward_batch.prefix_chunk_idx}" if chunk else "all" if keys is not new else "new"
        operands = (
            query[: batch.tokens],
            k.reshape(-1, heads, layer.qk_head_dim)[: sum(keys)],
            v.reshape(-1, heads, layer.v_head_dim)[: sum(keys)],
        )
        starts = self._offsets("new", new), self._offsets(form, keys)
        if self.triton:
            longest = max(new, default=0), max(keys, default=0)
            result, result_lse = attend(*operands, *starts, longest, layer.scaling, not chunk, self.config)
        else:
            result, result_lse = reference.attention(
                *operands,
                softmax_scale=layer.scaling,
                causal=not chunk,
                cu_seqlens_q=starts[0],
                cu_seqlens_k=starts[1],
                config=self.config,
            )
        out[: batch.tokens], lse[: batch.tokens] = result, result_lse.T
        dispatch.counters.add(self._kernels[phase], batch.tokens)
        return (out, lse) if forward_batch.mha_return_lse else out.flatten(1)

    def _offsets(self, name: str, lengths: list[int]) -> torch.Tensor:
        """Where sequences begin, int32 [B + 1], made once a step and copied behind what the GPU does."""
        if name not in self._starts:
            held = torch.tensor([0, *lengths]).cumsum(0).int()
            if self.device.startswith("cuda"):
                held = held.pin_memory().to(self.device, non_blocking=True)
            self._starts[name] = held
        return self._starts[name]
