"""ZYFA as SGLang's attention backend: what it writes to the token pool, and attention over that pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from zyfa_backend import dispatch, reference, settings
from zyfa_backend.config import ConfigError
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.quantization import Quantized, quantize_kv, quantize_q
from zyfa_backend.rotation import rotate
from zyfa_backend.scales import FEW_TOKENS, LayerScales
from zyfa_backend.serving import DTYPES, announce, cache_config_for, new_store, report_saturation
from zyfa_backend.sglang import NAME, hybrid
from zyfa_backend.sglang.batch import Batch, read_batch
from zyfa_backend.sglang.calibration import Calibration, is_health_check
from zyfa_backend.sglang.checks import ACCEPTED_CACHES, call_reasons, layer_reasons
from zyfa_backend.sglang.selection import decode_name, prefill_name


@dataclass(frozen=True)
class Served:
    """One attention layer: its name in the model, its scales, the kernels that serve it, its window in its own pool."""

    name: str
    scales: LayerScales
    kernels: dict[str, str]
    write_kernel: str
    window: int | None
    in_window_pool: bool


class ZyfaAttnBackend(AttentionBackend):
    """Extend and decode over SGLang's token pool, rotated FP8 (or int8) K and FP8 V, or the model's dtype.

    runner: a ModelRunner, of which `device`, `dtype`, `kv_cache_dtype`, `model`, `server_args`, `token_to_kv_pool`,
    `req_to_token_pool` and the names of the prefill and decode backends are read. Raises Unsupported or ConfigError.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = str(runner.device)
        self.dtype = runner.dtype
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.kv_cache_dtype = self.data_type = runner.kv_cache_dtype
        self.forward_metadata: Batch | None = None
        cache = ACCEPTED_CACHES[runner.kv_cache_dtype]
        self.config = cache_config_for(cache, settings.load().config, cache, "--kv-cache-dtype fp8_e4m3")
        self.decode_backend = decode_name(runner)
        self._check_pair(prefill_name(runner))
        args = runner.server_args
        ranks = {"tensor parallel": getattr(args, "tp_size", 1), "pipeline": getattr(args, "pp_size", 1)}
        self.store = new_store(self.config, ranks)
        self._calibration = Calibration(self.store)
        self._names: dict[int, str] = {}
        self._served: dict[int, Served] = {}
        self._attach(getattr(runner, "model", None))

    def _check_pair(self, prefill: str) -> None:
        """Raises Unsupported where another backend writes or reads bytes that only ZYFA understands."""
        if prefill != NAME and (self.config.quantized or self.config.rotation != "none"):
            raise Unsupported(
                f"ZYFA decodes, from a cache it quantises or rotates, only what it prefilled; here {prefill} prefills. "
                f"Choose --prefill-attention-backend {NAME} or another decode backend"
            )
        if self.decode_backend != NAME and self.config.qk_format == "int8":
            raise ConfigError(
                f"ZYFA_CONFIG with qk_format=int8 needs --decode-attention-backend {NAME}; {self.decode_backend} "
                f"reads K as e4m3"
            )

    def _attach(self, model: torch.nn.Module | None) -> None:
        """Check every attention layer of the model at start-up and choose its kernels. Raises Unsupported."""
        if model is None:
            return
        from sglang.srt.layers.radix_attention import RadixAttention

        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, RadixAttention)]
        reasons = list(dict.fromkeys(reason for _, layer in layers for reason in layer_reasons(layer)))
        if reasons:
            raise Unsupported("; ".join(reasons))
        for name, layer in layers:
            self._names.setdefault(layer.layer_id, name)
        for _, layer in layers:
            self.served(layer)

    def served(self, layer: Any) -> Served:
        """What serves `layer`, a RadixAttention; layers that share a cache share its scales."""
        found = self._served.get(id(layer))
        if found is None:
            if reasons := layer_reasons(layer):
                raise Unsupported("; ".join(reasons))
            found = self._served[id(layer)] = self._serve(layer)
        return found

    def _serve(self, layer: Any) -> Served:
        name = self._names.setdefault(layer.layer_id, f"layers.{layer.layer_id}")
        window = None if layer.sliding_window_size in (None, -1) else int(layer.sliding_window_size)
        kernels = {
            phase: dispatch.select(
                dispatch.Shape(layer.qk_head_dim, layer.v_head_dim, phase, self.config, DTYPES[self.dtype]), self.device
            )
            for phase in ("causal", "decode")
        }
        if self.config.quantized:
            self.store.check(name, layer.tp_k_head_num)
        scales = self.store.layer(name, layer.tp_k_head_num, checkpoint_scales(layer), self.device)
        if not scales.frozen and (self.decode_backend != NAME or not self.config.quantized):
            # A decode captured in a graph before the first prefill can't follow scales that are found later.
            scales.fix(torch.tensor(1.0), torch.tensor(1.0), "default 1")
        mapping = getattr(self.token_to_kv_pool, "layers_mapping", None)
        decode = kernels["decode"] if self.decode_backend == NAME else f"{self.decode_backend}, the engine's"
        source = scales.source if scales.frozen else f"calibrated by the first {FEW_TOKENS} tokens"
        announce(
            f"ZYFA serves layers with {layer.tp_q_head_num} query and {layer.tp_k_head_num} KV heads of "
            f"{layer.qk_head_dim}{'' if window is None else f', window {window + 1}'}: prefill {kernels['causal']}, "
            f"decode {decode}, cache {ACCEPTED_CACHES[self.kv_cache_dtype]}, rotation {self.config.rotation}"
            f"{f', scales {source}' if self.config.quantized else ''} on {self.device}"
        )
        write = f"torch/{'rotate-quantize' if self.config.quantized else 'write'}-hd{layer.qk_head_dim}"
        in_window_pool = mapping is not None and bool(mapping[layer.layer_id][1])
        return Served(name, scales, kernels, write, window, in_window_pool)

    def share_cache_with(self, decode: AttentionBackend) -> None:
        """Make `decode`, a backend of the engine, write what this one writes and turn its queries alike."""
        if self.config.quantized or self.config.rotation != "none":
            hybrid.adapt(decode, self)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            raise Unsupported(self._no_graph())
        self.forward_metadata = read_batch(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise Unsupported(self._no_graph())

    init_cpu_graph_state = init_cuda_graph_state

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def support_triton(self) -> bool:
        return not self.device.startswith("cpu")

    def _no_graph(self) -> str:
        kernels = sorted({served.kernels["decode"] for served in self._served.values()})
        return (
            f"ZYFA's decode ({', '.join(kernels)}) plans on the host and can't be captured in a graph; add "
            f"--disable-cuda-graph, or choose a --decode-attention-backend of the engine, which may be captured"
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of each request's new tokens to its cached prefix and, causally, to themselves.

        q: [T, Hq · D] or [T, Hq, D], after RoPE; k: [T, Hkv, D], v: [T, Hkv, Dv], or None to read all from the pool.
        save_kv_cache False writes nothing: k and v take part as they would if they had been written. Returns
        [T, Hq · Dv], or q's shape where Dv is D. k and v stay as they are. Raises Unsupported.
        """
        served, batch = self._begin(layer, kwargs)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        new = self._new(layer, served, batch, k, v, save_kv_cache, forward_batch)
        out = query.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for start, end, length, row in batch.extends:
            own = None if new is None else (new[0][start:end], new[1][start:end])
            out[start:end] = self._attend(layer, served, query[start:end], length, row, own)
        dispatch.counters.add(served.kernels["causal"], batch.tokens)
        return _shaped(out, q, layer)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one new token for each request; arguments and result as in `forward_extend`."""
        served, batch = self._begin(layer, kwargs)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        new = self._new(layer, served, batch, k, v, save_kv_cache, forward_batch)
        out = query.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if batch.decode_rows is not None and new is not None:
            for i, length in enumerate(batch.decode_lengths):
                own = (new[0][i : i + 1], new[1][i : i + 1])
                out[i : i + 1] = self._attend(layer, served, query[i : i + 1], length, batch.decode_rows[i], own)
        elif batch.decode_rows is not None:
            count, longest = len(batch.decode_lengths), max(batch.decode_lengths)
            k_cache, v_cache = self._buffers(layer)
            out[:count] = reference.decode(
                query[:count],
                k_cache.unsqueeze(1),
                v_cache.unsqueeze(1),
                self._slots(self.req_to_token_pool.req_to_token[batch.decode_rows, :longest], served),
                torch.tensor(batch.decode_lengths),
                k_scale=served.scales.k,
                v_scale=served.scales.v,
                softmax_scale=layer.scaling,
                window=served.window,
                config=self.config,
            )[0]
        dispatch.counters.add(served.kernels["decode"], len(batch.decode_lengths))
        return _shaped(out, q, layer)

    def _begin(self, layer: Any, arguments: dict[str, Any]) -> tuple[Served, Batch]:
        if reasons := call_reasons(arguments):
            raise Unsupported(f"ZYFA does not serve {'; '.join(reasons)}")
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata was not called before the first forward pass")
        return self.served(layer), self.forward_metadata

    def _new(self, layer, served: Served, batch: Batch, k, v, save: bool, forward_batch):
        """The new tokens' codes where the pool does not hold them, else None after they were written."""
        if k is None or v is None:
            return None
        codes = self.encode(layer, served, forward_batch, k[: batch.tokens], v[: batch.tokens])
        if not save and not self.written_by_the_engine(forward_batch):
            return codes
        self.write(layer, served, forward_batch, *codes)
        return None

    def written_by_the_engine(self, forward_batch: Any) -> bool:
        """Whether the engine's rotary kernel has put K and V into the pool in its own form, which ZYFA replaces."""
        if self.device.startswith("cpu") or (not self.config.quantized and self.config.rotation == "none"):
            return False
        from sglang.srt.models.utils import enable_fused_set_kv_buffer

        return bool(enable_fused_set_kv_buffer(forward_batch))

    def encode(
        self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K rotated and both quantised, as the pool holds them: new tensors [T, Hkv, D], uint8, int8 or the dtype."""
        k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        if not self.config.quantized:
            return quantize_kv(k, 1.0, "none", self.config.rotation).to(self.kv_cache_dtype), v.to(self.kv_cache_dtype)
        turned, scales = rotate(k, self.config.rotation), served.scales
        if not scales.frozen and not _is_rehearsal(forward_batch):
            counts = not is_health_check(forward_batch)
            self._calibration.observe(served.name, scales, turned, v, counts, lambda: self._buffers(layer))
        if not self.device.startswith("cpu"):
            # A count would wait for the GPU.
            k_codes = quantize_kv(turned, scales.k, self.config.qk_format)
            return k_codes, quantize_kv(v, scales.v, self.config.v_format)
        k_codes, lost_k = quantize_kv(turned, scales.k, self.config.qk_format, count_saturated=True)
        v_codes, lost_v = quantize_kv(v, scales.v, self.config.v_format, count_saturated=True)
        if lost_k or lost_v:
            report_saturation(served.name, lost_k + lost_v, k.numel() + v.numel())
        return k_codes, v_codes

    def write(
        self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store codes of `encode` at the slots of the new tokens of `forward_batch`."""
        dtype = self.token_to_kv_pool.dtype
        # Of the pool's own dtype, so that SGLang stores them as they are and divides nothing.
        place = self._place(forward_batch, k.shape[0])
        if not served.scales.frozen:
            self._calibration.wrote(served.name, place.swa_loc if served.in_window_pool else place.loc)
        self.token_to_kv_pool.set_kv_buffer(layer, place, k.view(dtype), v.view(dtype))
        dispatch.counters.add(served.write_kernel, k.shape[0])

    def _place(self, forward_batch: Any, tokens: int) -> KVWriteLoc:
        """Where new tokens go; nothing of it is read by the host, so that a graph may capture it."""
        slots = forward_batch.out_cache_loc[:tokens]
        translate = getattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa", None)
        # 0.5.18 does not tell physical slots apart.
        known = "physical" in KVWriteLoc.__dataclass_fields__
        extra = {"physical": forward_batch.out_cache_loc_is_physical} if known else {}
        return KVWriteLoc(slots, translate(slots) if translate is not None else None, **extra)

    def _buffers(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the layer's pool, [slots, Hkv, D], as codes or in the model's dtype."""
        k = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if self.config.quantized:
            k = k.view(torch.int8 if self.config.qk_format == "int8" else torch.uint8)
            v = v.view(torch.uint8)
        return k, v

    def _slots(self, slots: torch.Tensor, served: Served) -> torch.Tensor:
        """Slots of the layer's own pool for slots of the full one."""
        if served.in_window_pool:
            # Tokens that left the window have no slot there; none of them is read.
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots).clamp_min(0)
        return slots.long()

    def _attend(self, layer, served: Served, query, length: int, row, own) -> torch.Tensor:
        """[T, Hq, Dv] of one request's new tokens; own: their codes where the pool does not hold them."""
        context = length - query.shape[0]
        first = 0 if served.window is None else max(0, context - served.window)
        stop = length if own is None else context
        slots = self._slots(self.req_to_token_pool.req_to_token[row, first:stop], served)
        k, v = self._buffers(layer)
        keys = _sequence(k, slots, first, length, None if own is None else own[0])
        values = _sequence(v, slots, first, length, None if own is None else own[1])
        out, _ = reference.attend(
            quantize_q(query, self.config),
            Quantized(keys, served.scales.k, self.config.qk_format),
            Quantized(values, served.scales.v, self.config.v_format),
            softmax_scale=layer.scaling,
            causal=True,
            window=served.window,
            context=context,
            config=self.config,
            out_dtype=query.dtype,
        )
        return out


def _is_rehearsal(forward_batch: Any) -> bool:
    """Whether this pass runs on made-up tokens, which go to slot 0: they say nothing about scales."""
    from sglang.srt.model_executor.runner import get_is_capture_mode

    return get_is_capture_mode() or not bool((forward_batch.out_cache_loc != 0).any())


def _sequence(
    buffer: torch.Tensor, slots: torch.Tensor, first: int, length: int, own: torch.Tensor | None
) -> torch.Tensor:
    """[length, Hkv, D] of one request: zeros, then the slots from token `first` on, then its own new tokens."""
    held = buffer.index_select(0, slots)
    if not first and own is None:
        return held
    out = buffer.new_zeros(length, *buffer.shape[1:])
    out[first : first + held.shape[0]] = held
    if own is not None:
        out[length - own.shape[0] :] = own
    return out


def _shaped(out: torch.Tensor, q: torch.Tensor, layer: Any) -> torch.Tensor:
    """out [T, Hq, Dv] in the form that the engine's backends give: q's where the dimensions allow it."""
    return out.view(q.shape) if layer.qk_head_dim == layer.v_head_dim else out.flatten(1)


def checkpoint_scales(layer: Any) -> tuple[float, float] | None:
    """Per-tensor (k, v) scales that the checkpoint brought; None where it has none or they are 1."""
    found = []
    for name in ("k_scale", "v_scale"):
        value = getattr(layer, f"{name}_float", None)
        if value is None and getattr(layer, name, None) is not None:
            value = float(getattr(layer, name))
        found.append(1.0 if value is None else float(value))
    return None if found == [1.0, 1.0] else (found[0], found[1])
