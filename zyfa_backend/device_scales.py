"""K and V scales that live on a GPU: calibrated there, without the host waiting for the device."""

from __future__ import annotations

import torch

from zyfa_backend import rotation
from zyfa_backend.scales import FEW_TOKENS, ScaleStore, calibrated


class DeviceScales:
    """Per-tensor scales of one layer, `k` and `v`, fp32 [1] on `device`; dequantised = stored · scale.

    They are those of the store where it knows some (of scales per head the largest, which holds all heads), otherwise
    calibrated from the first tokens that the layer writes. Until the host has seen that both are set, every write
    offers its tokens; what the host sees was copied to pinned memory behind the work, so it never waits.
    """

    def __init__(
        self, store: ScaleStore, name: str, heads: int, checkpoint: tuple[float, float] | None, device: torch.device
    ) -> None:
        self.name, self._store = name, store
        self.k, self.v = (torch.ones(1, dtype=torch.float32, device=device) for _ in range(2))
        self._state = torch.zeros(4, dtype=torch.float32, device=device)  # k is set, v is set, k, v
        self._seen: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._tokens = 0
        self.frozen = False
        if (known := store.known(name, heads, checkpoint)) is not None:
            k, v, source = known
            self.k.fill_(float(k.max()))
            self.v.fill_(float(v.max()))
            self.frozen = True
            store.adopt(name, float(k.max()), float(v.max()), FEW_TOKENS, source)

    def offer(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Calibrate what is still open from tokens [T, Hkv, D], K not rotated; those with slot -1 do not count."""
        if self.frozen or torch.cuda.is_current_stream_capturing():  # which allows no question about events either
            return
        if self._copied is not None and self._copied.query():
            self._read()
            if self.frozen:
                return
        config, headroom = self._store.config, self._store.headroom
        live = (slots >= 0).view(-1, 1, 1)
        turned = key.float() @ rotation.matrix(key.shape[-1], config.rotation, device=str(key.device))
        for place, (values, scale, form) in enumerate(
            ((turned, self.k, config.qk_format), (value.float(), self.v, config.v_format))
        ):
            largest = torch.where(live & values.isfinite(), values.abs(), 0).amax()
            found = (self._state[place] == 0) & (largest > 0)
            scale.copy_(torch.where(found, calibrated(largest, key.shape[0], form, headroom), scale))
            self._state[place].logical_or_(found)
            self._state[2 + place].copy_(scale[0])
        self._tokens = self._tokens or key.shape[0]
        if self._copied is None:
            self._seen = torch.empty(4, dtype=torch.float32, pin_memory=True)
            self._seen.copy_(self._state, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _read(self) -> None:
        assert self._seen is not None
        k_set, v_set, k, v = self._seen.tolist()
        self._copied = None
        if k_set and v_set:
            self.frozen = True
            self._store.adopt(self.name, k, v, self._tokens, "calibrated")
