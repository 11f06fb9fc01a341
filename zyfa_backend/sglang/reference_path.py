"""Attention over SGLang's token pool by torch's reference, one request after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zyfa_backend import dispatch, reference
from zyfa_backend.quantization import Quantized, quantize_kv, quantize_q
from zyfa_backend.rotation import rotate
from zyfa_backend.serving import report_saturation
from zyfa_backend.sglang.batch import Batch, read_batch
from zyfa_backend.sglang.path import Codes, Path

if TYPE_CHECKING:
    from zyfa_backend.sglang.backend import Served


class ReferencePath(Path):
    """Every CPU's."""

    def kernels(self, qk_dim: int, v_dim: int, dtype: str) -> dict[str, str]:
        return {
            phase: dispatch.select(dispatch.Shape(qk_dim, v_dim, phase, self.config, dtype), "cpu")
            for phase in ("causal", "decode")
        }

    def write_name(self, dim: int) -> str:
        return f"torch/{'rotate-quantize' if self.config.quantized else 'write'}-hd{dim}"

    def plan(self, forward_batch: Any) -> Batch:
        return read_batch(forward_batch)

    def encode(self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> Codes:
        k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        if not self.config.quantized:
            dtype = self.pool.dtype
            return quantize_kv(k, 1.0, "none", self.config.rotation).to(dtype), v.to(dtype)
        turned, scales = self.observe(layer, served, forward_batch, k, v), served.scales
        if turned is None:
            turned = rotate(k, self.config.rotation)
        k_codes, lost_k = quantize_kv(turned, scales.k, self.config.qk_format, count_saturated=True)
        v_codes, lost_v = quantize_kv(v, scales.v, self.config.v_format, count_saturated=True)
        if lost_k or lost_v:
            report_saturation(served.name, lost_k + lost_v, k.numel() + v.numel())
        return k_codes, v_codes

    def extend(self, layer: Any, served: Served, step: Batch, query: torch.Tensor, own: Codes | None) -> torch.Tensor:
        out = query.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for start, end, length, row in step.extends:
            part = None if own is None else (own[0][start:end], own[1][start:end])
            out[start:end] = self._attend(layer, served, query[start:end], length, row, part)
        return out

    def decode(self, layer: Any, served: Served, step: Batch, query: torch.Tensor, own: Codes | None) -> torch.Tensor:
        out = query.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if step.decode_rows is None:
            return out
        if own is not None:
            for i, length in enumerate(step.decode_lengths):
                part = (own[0][i : i + 1], own[1][i : i + 1])
                out[i : i + 1] = self._attend(layer, served, query[i : i + 1], length, step.decode_rows[i], part)
            return out
        count, longest = len(step.decode_lengths), max(step.decode_lengths)
        k_cache, v_cache = self.buffers(layer)
        out[:count] = reference.decode(
            query[:count],
            k_cache.unsqueeze(1),
            v_cache.unsqueeze(1),
            self._slots(self.slots_of_tokens[step.decode_rows, :longest], served),
            torch.tensor(step.decode_lengths),
            k_scale=served.scales.k,
            v_scale=served.scales.v,
            softmax_scale=layer.scaling,
            window=served.window,
            config=self.config,
        )[0]
        return out

    def _slots(self, slots: torch.Tensor, served: Served) -> torch.Tensor:
        """Slots of the layer's own pool for slots of the full one."""
        if served.in_window_pool:
            # Tokens that left the window have no slot there; none of them is read.
            slots = self.pool.translate_loc_from_full_to_swa(slots).clamp_min(0)
        return slots.long()

    def _attend(self, layer: Any, served: Served, query, length: int, row, own: Codes | None) -> torch.Tensor:
        """[T, Hq, Dv] of one request's new tokens; own: their codes where the pool does not hold them."""
        context = length - query.shape[0]
        first = 0 if served.window is None else max(0, context - served.window)
        stop = length if own is None else context
        slots = self._slots(self.slots_of_tokens[row, first:stop], served)
        k, v = self.buffers(layer)
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
