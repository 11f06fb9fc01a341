"""Scales found while the server runs: provisional for the first tokens, final once enough were seen.

An SGLang server is first asked by its own warm-up, of six tokens, and by health checks, of one. Scales taken from those
alone would stay poor for good. So the first tokens get scales with room to spare, and what they left in the pool is
rescaled when the final ones are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zyfa_backend.quantization import LARGEST, Quantized, quantize_kv
from zyfa_backend.scales import FEW_TOKENS, LayerScales, ScaleStore

MOST_PIECES = 256


@dataclass
class _Early:
    """K (rotated) and V of the tokens that count so far, and the slots that hold codes of provisional scales.

    has_scales: whether provisional ones were found.
    """

    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    slots: list[torch.Tensor] = field(default_factory=list)
    has_scales: bool = False

    def with_new(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([*self.k, k]), torch.cat([*self.v, v])


class Calibration:
    """Finds the scales of the layers of `store` whose scales are not known when the server starts."""

    def __init__(self, store: ScaleStore) -> None:
        self._store = store
        self._early: dict[str, _Early] = {}

    def observe(
        self,
        name: str,
        scales: LayerScales,
        k: torch.Tensor,
        v: torch.Tensor,
        counts: bool,
        buffers: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Take in new tokens of layer `name`, k rotated and v, each [T, Hkv, D], before they are encoded.

        counts: whether they say something of the text to come. buffers: K and V of the layer's pool, [slots, Hkv, D].
        """
        early = self._early.setdefault(name, _Early())
        seen_k, seen_v = early.with_new(k, v)
        before = scales.k.clone(), scales.v.clone()
        if counts and seen_k.shape[0] >= FEW_TOKENS:
            self._store.calibrate(name, seen_k, seen_v)
        elif not early.has_scales or not self._fits(scales, k, v):
            # Only then: each change of scales rounds the early tokens once more.
            early.has_scales = True
            trial = LayerScales(scales.k.shape[0], scales.k.device)
            trial.calibrate(seen_k, seen_v, self._store.config, self._store.headroom)
            scales.k.copy_(trial.k)
            scales.v.copy_(trial.v)
        if not (torch.equal(before[0], scales.k) and torch.equal(before[1], scales.v)):
            self._rescale(early, before, scales, buffers)
        if scales.frozen:
            del self._early[name]
        elif counts:
            early.k, early.v = [seen_k], [seen_v]

    def wrote(self, name: str, slots: torch.Tensor) -> None:
        """Note that codes of layer `name` went to `slots` of its pool while its scales were provisional."""
        if name in self._early:
            held = self._early[name].slots
            held.append(slots)
            if len(held) >= MOST_PIECES:  # a long answer to a short first prompt adds a piece a token
                held[:] = [torch.cat(held)]

    def _fits(self, scales: LayerScales, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether the provisional scales hold these tokens, too."""
        config = self._store.config
        parts = ((k, scales.k, LARGEST[config.qk_format]), (v, scales.v, LARGEST[config.v_format]))
        return all(bool((x.float().abs().amax((0, 2)) <= scale * largest).all()) for x, scale, largest in parts)

    def _rescale(self, early: _Early, before: tuple[torch.Tensor, torch.Tensor], scales: LayerScales, buffers) -> None:
        """Bring the codes in the pool from the scales `before` to the present ones."""
        if not early.slots:
            return
        slots = torch.cat(early.slots).unique()
        early.slots = [slots]
        config = self._store.config
        parts = (
            (before[0], scales.k, config.qk_format),
            (before[1], scales.v, config.v_format),
        )
        for buffer, (old, new, form) in zip(buffers(), parts, strict=True):
            buffer[slots] = quantize_kv(Quantized(buffer[slots], old, form).dequantize(), new, form)


def is_health_check(forward_batch: Any) -> bool:
    """Whether a batch holds nothing but SGLang's own health checks, which are always the same token."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    rids = getattr(forward_batch, "rids", None) or []
    return len(rids) > 0 and all(str(rid).startswith(HEALTH_CHECK_RID_PREFIX) for rid in rids)
