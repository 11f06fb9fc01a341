"""What all ways to compute share: new K and V as codes, their place in SGLang's token pool, and what the pool holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from zyfa_backend import dispatch
from zyfa_backend.rotation import rotate
from zyfa_backend.sglang.calibration import Calibration, is_health_check

if TYPE_CHECKING:
    from zyfa_backend.sglang.backend import Served, ZyfaAttnBackend

Codes = tuple[torch.Tensor, torch.Tensor]


class Path:
    """How a backend computes: a subclass for torch's reference, one for the Triton kernels.

    own: codes of the new tokens where the pool does not hold them.
    """

    needs_cpu_seq_lens = True
    # Whether K and V of a step are stored by one launch, without codes in between.
    stores_at_once = False

    def __init__(self, backend: ZyfaAttnBackend) -> None:
        self.pool, self.config = backend.token_to_kv_pool, backend.config
        self.slots_of_tokens = backend.req_to_token_pool.req_to_token
        self.calibration = Calibration(backend.store)

    def kernels(self, qk_dim: int, v_dim: int, dtype: str) -> dict[str, str]:
        """Names of the kernels for "causal" and "decode". Raises Unsupported."""
        raise NotImplementedError

    def write_name(self, dim: int) -> str:
        """Name of the kernel that stores K and V."""
        raise NotImplementedError

    def plan(self, forward_batch: Any) -> Any:
        """What all layers of a step share; its `tokens` are the new ones of all requests."""
        raise NotImplementedError

    def extend(self, layer: Any, served: Served, step: Any, query: torch.Tensor, own: Codes | None) -> torch.Tensor:
        """[T, Hq, Dv] of new tokens query [T, Hq, D]; zeros behind the batch."""
        raise NotImplementedError

    def decode(self, layer: Any, served: Served, step: Any, query: torch.Tensor, own: Codes | None) -> torch.Tensor:
        """[B, Hq, Dv] of one new token for each request."""
        raise NotImplementedError

    def encode(self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> Codes:
        """K rotated and both quantised, as the pool holds them: new tensors [T, Hkv, D], uint8, int8 or the dtype."""
        raise NotImplementedError

    def store(
        self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor, step: Any = None
    ) -> None:
        """Encode new tokens and write them at their slots; step: of `plan`, None where another backend computes."""
        self.write(layer, served, forward_batch, *self.encode(layer, served, forward_batch, k, v))

    def write(self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store codes of `encode` at the slots of the new tokens of `forward_batch`."""
        dtype = self.pool.dtype
        place = self._place(forward_batch, k.shape[0])
        self.note_written(served, place.loc, place.swa_loc)
        # Of the pool's own dtype, so that SGLang stores them as they are and divides nothing.
        self.pool.set_kv_buffer(layer, place, k.view(dtype), v.view(dtype))
        dispatch.counters.add(served.write_kernel, k.shape[0])

    def note_written(self, served: Served, slots: torch.Tensor, window_slots: torch.Tensor | None) -> None:
        """While the scales of a layer are provisional: which slots hold codes that may have to be rescaled."""
        if not served.scales.frozen:
            own = window_slots if served.in_window_pool else slots
            if own is not None:
                # The engine's and a graph's buffers hold other slots in the next step.
                self.calibration.wrote(served.name, own.clone())

    def observe(
        self, layer: Any, served: Served, forward_batch: Any, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor | None:
        """Let new tokens k, v [T, Hkv, D] take part in finding the scales, while that lasts; K rotated, if it was."""
        if served.scales.frozen or is_rehearsal(forward_batch):
            return None
        turned, counts = rotate(k, self.config.rotation), not is_health_check(forward_batch)
        self.calibration.observe(served.name, served.scales, turned, v, counts, lambda: self.buffers(layer))
        return turned

    def _place(self, forward_batch: Any, tokens: int) -> KVWriteLoc:
        """Where new tokens go; nothing of it is read by the host, so that a graph may capture it."""
        slots = forward_batch.out_cache_loc[:tokens]
        translate = getattr(self.pool, "translate_loc_from_full_to_swa", None)
        # 0.5.18 does not tell physical slots apart.
        known = "physical" in KVWriteLoc.__dataclass_fields__
        extra = {"physical": forward_batch.out_cache_loc_is_physical} if known else {}
        return KVWriteLoc(slots, translate(slots) if translate is not None else None, **extra)

    def buffers(self, layer: Any) -> Codes:
        """K and V of the layer's pool, [slots, Hkv, D], as codes or in the model's dtype."""
        k, v = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        if self.config.quantized:
            k = k.view(torch.int8 if self.config.qk_format == "int8" else torch.uint8)
            v = v.view(torch.uint8)
        return k, v


def is_rehearsal(forward_batch: Any) -> bool:
    """Whether this pass runs on made-up tokens, which go to slot 0: they say nothing about scales."""
    from sglang.srt.model_executor.runner import get_is_capture_mode

    return get_is_capture_mode() or not bool((forward_batch.out_cache_loc != 0).any())
