"""ZYFA as SGLang's attention backend: what it writes to the token pool, and attention over that pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from zyfa_backend import dispatch, settings
from zyfa_backend.config import ConfigError
from zyfa_backend.dispatch import Unsupported
from zyfa_backend.scales import FEW_TOKENS, LayerScales
from zyfa_backend.serving import DTYPES, announce, cache_config_for, new_store
from zyfa_backend.sglang import NAME, hybrid
from zyfa_backend.sglang.checks import ACCEPTED_CACHES, call_reasons, layer_reasons, store_reasons
from zyfa_backend.sglang.path import Codes, Path
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
    `req_to_token_pool` and the names of the prefill and decode backends are read. kernels: "torch" or "triton" instead
    of what its device has; Triton's on a CPU need Triton's interpreter. Raises Unsupported or ConfigError.
    """

    def __init__(self, runner: Any, kernels: str | None = None) -> None:
        super().__init__()
        self.device = str(runner.device)
        self.dtype = runner.dtype
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.kv_cache_dtype = self.data_type = runner.kv_cache_dtype
        self.forward_metadata: Any = None
        cache = ACCEPTED_CACHES[runner.kv_cache_dtype]
        self.config = cache_config_for(cache, settings.load().config, cache, "--kv-cache-dtype fp8_e4m3")
        self.decode_backend = decode_name(runner)
        self._check_pair(prefill_name(runner))
        args = runner.server_args
        ranks = {"tensor parallel": getattr(args, "tp_size", 1), "pipeline": getattr(args, "pp_size", 1)}
        self.store = new_store(self.config, ranks)
        self.path = _path(self, kernels)
        self.needs_cpu_seq_lens = self.path.needs_cpu_seq_lens
        self._names: dict[int, str] = {}
        self._served: dict[int, Served] = {}
        self._attach(getattr(runner, "model", None))
        self._check_stores(args)

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

    def _check_stores(self, args: Any) -> None:
        """Raises Unsupported where codes would outlive the scales that they were written with."""
        stores = store_reasons(args)
        open_layers = [served.name for served in self.all_served() if not served.scales.frozen]
        if stores and self.config.quantized and open_layers:
            raise Unsupported(
                f"{', '.join(stores)} with scales that are found while the server runs ({open_layers[0]} and "
                f"{len(open_layers) - 1} more): what lies outside the pool keeps codes of other scales. Set "
                "ZYFA_SCALES to a file that ZYFA_SAVE_SCALES wrote"
            )

    def served(self, layer: Any) -> Served:
        """What serves `layer`, a RadixAttention; layers that share a cache share its scales."""
        found = self._served.get(id(layer))
        if found is None:
            if reasons := layer_reasons(layer):
                raise Unsupported("; ".join(reasons))
            found = self._served[id(layer)] = self._serve(layer)
        return found

    def all_served(self) -> list[Served]:
        return list(self._served.values())

    def _serve(self, layer: Any) -> Served:
        name = self._names.setdefault(layer.layer_id, f"layers.{layer.layer_id}")
        window = None if layer.sliding_window_size in (None, -1) else int(layer.sliding_window_size)
        kernels = self.path.kernels(layer.qk_head_dim, layer.v_head_dim, DTYPES[self.dtype])
        if self.config.quantized:
            self.store.check(name, layer.tp_k_head_num)
        scales = self.store.layer(name, layer.tp_k_head_num, checkpoint_scales(layer), self.device)
        foreign = self.decode_backend != NAME
        if not scales.frozen and (foreign or not self.config.quantized):
            # A decode captured in a graph before the first prefill can't follow scales that are found later.
            scales.fix(torch.tensor(1.0), torch.tensor(1.0), "default 1")
        elif foreign and self.config.quantized:
            hybrid.raise_scales(scales)
        mapping = getattr(self.token_to_kv_pool, "layers_mapping", None)
        decode = kernels["decode"] if self.decode_backend == NAME else f"{self.decode_backend}, the engine's"
        source = scales.source if scales.frozen else f"calibrated by the first {FEW_TOKENS} tokens"
        announce(
            f"ZYFA serves layers with {layer.tp_q_head_num} query and {layer.tp_k_head_num} KV heads of "
            f"{layer.qk_head_dim}{'' if window is None else f', window {window + 1}'}: prefill {kernels['causal']}, "
            f"decode {decode}, cache {ACCEPTED_CACHES[self.kv_cache_dtype]}, rotation {self.config.rotation}"
            f"{f', scales {source}' if self.config.quantized else ''} on {self.device}"
        )
        in_window_pool = mapping is not None and bool(mapping[layer.layer_id][1])
        return Served(name, scales, kernels, self.path.write_name(layer.qk_head_dim), window, in_window_pool)

    def share_cache_with(self, decode: AttentionBackend) -> None:
        """Make `decode`, a backend of the engine, write what this one writes and turn its queries alike."""
        if self.config.quantized or self.config.rotation != "none":
            hybrid.adapt(decode, self)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that no graph holds."""
        self.forward_metadata = self.path.plan(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the buffers that captured decodes of up to max_bs requests read. Raises Unsupported on a CPU."""
        self._graphs().init_graphs(max_bs, max_num_tokens)

    init_cpu_graph_state = init_cuda_graph_state

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the capture of a decode, or its replay. Raises Unsupported on a CPU and for other modes."""
        step = self.forward_metadata = self._graphs().plan_graph(forward_batch, in_capture)
        if in_capture:
            return
        # What a replay writes and runs passes by the methods below.
        for served in self.all_served():
            self.path.note_written(served, forward_batch.out_cache_loc, step.window_slots)
            dispatch.counters.add(served.write_kernel, forward_batch.batch_size - forward_batch.num_padding)
            dispatch.counters.add(served.kernels["decode"], forward_batch.batch_size - forward_batch.num_padding)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def support_triton(self) -> bool:
        return not self.device.startswith("cpu")

    def _graphs(self) -> Any:
        if not hasattr(self.path, "plan_graph"):
            kernels = sorted({served.kernels["decode"] for served in self._served.values()})
            raise Unsupported(
                f"ZYFA's decode ({', '.join(kernels)}) plans on the host and can't be captured in a graph; add "
                f"--disable-cuda-graph, or choose a --decode-attention-backend of the engine, which may be captured"
            )
        return self.path

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
        save_kv_cache False writes nothing: k and v take part as they would if they had been written. (On ROCm it is
        how the engine says that its rotary kernel has written them, so there they are written all the same.) Returns
        [T, Hq · Dv], or q's shape where Dv is D. k and v stay as they are. Raises Unsupported.
        """
        served, query, own = self._begin(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        out = self.path.extend(layer, served, self.forward_metadata, query, own)
        dispatch.counters.add(served.kernels["causal"], self.forward_metadata.tokens)
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
        served, query, own = self._begin(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        out = self.path.decode(layer, served, self.forward_metadata, query, own)
        dispatch.counters.add(served.kernels["decode"], self.forward_metadata.tokens)
        return _shaped(out, q, layer)

    def _begin(
        self, q, k, v, layer: Any, forward_batch: Any, save: bool, arguments: dict[str, Any]
    ) -> tuple[Served, torch.Tensor, Codes | None]:
        """Stores the new tokens; returns q as [T, Hq, D] and, where they were not to be stored, their codes."""
        if reasons := call_reasons(arguments):
            raise Unsupported(f"ZYFA does not serve {'; '.join(reasons)}")
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata was not called before the first forward pass")
        served, tokens = self.served(layer), self.forward_metadata.tokens
        query, own = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), None
        if k is not None and v is not None:
            new = (layer, served, forward_batch, k[:tokens], v[:tokens])
            if save or self.written_by_the_engine(forward_batch):
                self.path.store(*new, self.forward_metadata)
            else:
                own = self.path.encode(*new)
        return served, query, own

    def written_by_the_engine(self, forward_batch: Any) -> bool:
        """Whether the engine's rotary kernel has put K and V into the pool in its own form, which ZYFA replaces."""
        if self.device.startswith("cpu") or (not self.config.quantized and self.config.rotation == "none"):
            return False
        from sglang.srt.models.utils import enable_fused_set_kv_buffer

        return bool(enable_fused_set_kv_buffer(forward_batch))


def _path(backend: ZyfaAttnBackend, kernels: str | None) -> Path:
    if (kernels or ("torch" if backend.device.startswith("cpu") else "triton")) == "torch":
        from zyfa_backend.sglang.reference_path import ReferencePath

        return ReferencePath(backend)
    from zyfa_backend.sglang.gpu import TritonPath

    return TritonPath(backend)


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
