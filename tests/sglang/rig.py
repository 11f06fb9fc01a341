"""SGLang's own pools, layers and batches around ZYFA's backend, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from zyfa_backend.sglang import selection

FP8 = torch.float8_e4m3fn
SLOTS, CONTEXT = 4096, 1024


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


class Model(torch.nn.Module):
    """Nothing but attention layers, named as in SGLang's models."""

    def __init__(self, q_heads: int, kv_heads: int, dim: int, windows: Sequence[int], **layer_arguments: Any) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList()
        for index, window in enumerate(windows):
            block = torch.nn.Module()
            block.self_attn = torch.nn.Module()
            block.self_attn.attn = RadixAttention(
                q_heads, dim, dim**-0.5, kv_heads, index, sliding_window_size=window, **layer_arguments
            )
            self.model.layers.append(block)

    def attention(self, index: int) -> RadixAttention:
        return self.model.layers[index].self_attn.attn


class Rig:
    """A request pool, a token pool with shuffled slots, a model of attention layers and the backend over them.

    cache: dtype of the token pool. windows: sliding window of each layer as SGLang counts it, -1 for none.
    window_layers: layers whose K and V lie in a pool of their own (SWAKVPool). decode: name of the decode backend.
    page: slots of a page of the pool; context: tokens of the longest request.
    kernels: "torch" or "triton" instead of the device's own.
    """

    def __init__(
        self,
        cache: torch.dtype = FP8,
        q_heads: int = 4,
        kv_heads: int = 2,
        dim: int = 128,
        windows: Sequence[int] = (-1,),
        window_layers: Sequence[int] = (),
        dtype: torch.dtype = torch.bfloat16,
        decode: str = "zyfa",
        prefill: str = "zyfa",
        device: str = "cpu",
        seed: int = 0,
        page: int = 1,
        context: int = CONTEXT,
        kernels: str | None = None,
        **layer_arguments: Any,
    ) -> None:
        self.q_heads, self.kv_heads, self.dim, self.dtype, self.device = q_heads, kv_heads, dim, dtype, device
        self.model = Model(q_heads, kv_heads, dim, windows, **layer_arguments).to(device)
        self.requests = ReqToTokenPool(16, context, device, enable_memory_saver=False)
        common = {"page_size": page, "dtype": cache, "head_num": kv_heads, "head_dim": dim, "device": device}
        if window_layers:
            full = [index for index in range(len(windows)) if index not in window_layers]
            self.pool: Any = SWAKVPool(
                SLOTS, SLOTS, swa_attention_layer_ids=list(window_layers), full_attention_layer_ids=full, **common
            )
            # Slots of the window's pool, in another order than those of the full one.
            pages = 1 + torch.randperm(SLOTS // page)
            slots = (pages[:, None] * page + torch.arange(page)).flatten()
            mapping = torch.cat([torch.arange(page), slots, torch.tensor([-1])])
            self.pool.register_mapping(mapping.to(device))
        else:
            self.pool = MHATokenToKVPool(SLOTS, layer_num=len(windows), enable_memory_saver=False, **common)
        self.runner = SimpleNamespace(
            device=device,
            dtype=dtype,
            kv_cache_dtype=cache,
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.requests,
            kv_index_translator=None,
            model=self.model,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            server_args=SimpleNamespace(tp_size=1, pp_size=1),
            use_mla_backend=False,
            prefill_attention_backend_str=prefill,
            decode_attention_backend_str=decode,
        )
        self.page = page
        pages = 1 + torch.randperm(SLOTS // page - 1, generator=torch.Generator().manual_seed(seed))
        self._free = iter(pages.tolist())
        self._next_row = 1
        self.backend = selection.create(self.runner, kernels) if prefill == "zyfa" or decode == "zyfa" else None

    def request(self) -> int:
        """A new row of the request pool."""
        self._next_row += 1
        return self._next_row

    def extend(
        self, rows: Sequence[int], before: Sequence[int], new: Sequence[int], mode: ForwardMode = ForwardMode.EXTEND
    ) -> ForwardBatch:
        """A batch in which request `rows[i]`, of whose tokens `before[i]` are cached, gets `new[i]` more."""
        slots = torch.tensor(self._slots(rows, before, new), dtype=torch.long, device=self.device)
        for row, start, part in zip(rows, before, slots.split(list(new)), strict=True):
            self.requests.req_to_token[row, start : start + part.numel()] = part.int()
        lengths = torch.tensor([a + b for a, b in zip(before, new, strict=True)], device=self.device)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(sum(new), dtype=torch.long, device=self.device),
            req_pool_indices=torch.tensor(list(rows), device=self.device),
            seq_lens=lengths,
            out_cache_loc=slots,
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths.cpu(),
        )
        if mode != ForwardMode.DECODE:
            batch.extend_prefix_lens = torch.tensor(list(before), device=self.device)
            batch.extend_seq_lens = torch.tensor(list(new), device=self.device)
            batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = list(before), list(new)
        return batch

    def _slots(self, rows: Sequence[int], before: Sequence[int], new: Sequence[int]) -> list[int]:
        """New tokens fill a request's last page, then pages that are free."""
        out = []
        for row, start, count in zip(rows, before, new, strict=True):
            last = int(self.requests.req_to_token[row, start - 1]) if start else -1
            for position in range(start, start + count):
                last = last + 1 if position % self.page else next(self._free) * self.page
                out.append(last)
        return out

    def decode(self, rows: Sequence[int], before: Sequence[int]) -> ForwardBatch:
        return self.extend(rows, before, [1] * len(rows), ForwardMode.DECODE)

    def run(self, batch: ForwardBatch, q, k, v, layer: int = 0, backend: Any = None, **arguments: Any) -> torch.Tensor:
        """The layer's output [T, Hq, D] for q [T, Hq, D], k and v [T, Hkv, D], through SGLang's RadixAttention."""
        backend = backend or self.backend
        backend.init_forward_metadata(batch)
        k, v = (None if x is None else x.flatten(1) for x in (k, v))
        with forward_context(ForwardContext(attn_backend=backend)):
            out = self.model.attention(layer)(q.flatten(1), k, v, batch, **arguments)
        assert out.shape == (q.shape[0], self.q_heads * self.dim)
        return out.view(q.shape)

    def tensors(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of `tokens` tokens, with outliers in some channels of q and k as real models have them."""
        random = torch.Generator().manual_seed(seed)

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, self.dim, generator=random)

        q, k, v = normal(self.q_heads), normal(self.kv_heads), normal(self.kv_heads)
        far = self.dim // 2 + 6
        q[..., 3], k[..., 3], k[..., far] = q[..., 3] * 4, k[..., 3] * 6, k[..., far] - 8
        return tuple(x.to(self.dtype).to(self.device) for x in (q, k, v))

    def slots_of(self, row: int, length: int, layer: int = 0) -> torch.Tensor:
        """Where the first `length` tokens of a request lie in the pool of `layer`."""
        slots = self.requests.req_to_token[row, :length].long()
        mapping = getattr(self.pool, "layers_mapping", None)
        if mapping is not None and mapping[layer][1]:
            slots = self.pool.translate_loc_from_full_to_swa(slots)
        return slots

    def bytes_of(self, row: int, length: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request as stored."""
        slots = self.slots_of(row, length, layer)
        return tuple(x[slots] for x in self.pool.get_kv_buffer(layer))


def attention(q, k, v, scale: float, window: int | None = None) -> torch.Tensor:
    """Causal attention in fp64, the queries being the last of the keys; [Tq, Hq, D]."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    position = torch.arange(k.shape[0], device=q.device)
    query = position[k.shape[0] - q.shape[0] :, None]
    dead = position > query
    if window is not None:
        dead |= position < query - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(dead, -torch.inf).softmax(-1), v)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS error."""
    return float((out.double() - expected.double()).pow(2).mean().sqrt() / expected.double().pow(2).mean().sqrt())
