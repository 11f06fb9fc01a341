"""K and V scales per layer and head: from the checkpoint, from a file, or calibrated once and frozen."""

from __future__ import annotations

import functools
import json
import logging
import os

import torch

from zyfa_backend.config import AttentionConfig, ConfigError
from zyfa_backend.dispatch import counters
from zyfa_backend.quantization import LARGEST, SMALLEST_NORMAL

logger = logging.getLogger("vllm.zyfa")

# e4m3 keeps its relative precision over 15 binades, so room above the maximum costs nothing; int8 loses it in full.
HEADROOM = {"fp8_e4m3": 2.0, "int8": 1.25}
# A few tokens say little about the largest value: a first prompt shorter than this leaves more room.
FEW_TOKENS = 128
FEW_HEADROOM = {"fp8_e4m3": 64.0, "int8": 4.0}


def calibrated(largest: torch.Tensor, tokens: int, form: str, headroom: float | None) -> torch.Tensor:
    """Scales, fp32, for the largest magnitudes of a first prompt of so many tokens; headroom: None for the usual."""
    factor = headroom or (HEADROOM if tokens >= FEW_TOKENS else FEW_HEADROOM)[form]
    return (largest * (factor / LARGEST[form])).clamp_min(SMALLEST_NORMAL)


class LayerScales:
    """Scales of one layer: `k` and `v`, fp32 [Hkv]; dequantised = stored · scale.

    A head is frozen once a finite, non-zero maximum was seen for it; until then its scale is 1.
    """

    def __init__(self, heads: int, device: torch.device | str = "cpu") -> None:
        self.k = torch.ones(heads, dtype=torch.float32, device=device)
        self.v = torch.ones(heads, dtype=torch.float32, device=device)
        self._open_k = torch.ones(heads, dtype=torch.bool, device=device)
        self._open_v = torch.ones(heads, dtype=torch.bool, device=device)
        self.frozen = False
        self.source = "none"

    def fix(self, k: torch.Tensor, v: torch.Tensor, source: str) -> None:
        """Take scales that are known: each fp32, [Hkv] or a single value."""
        self.k.copy_(k.to(torch.float32).expand_as(self.k))
        self.v.copy_(v.to(torch.float32).expand_as(self.v))
        self.frozen, self.source = True, source

    def calibrate(self, k: torch.Tensor, v: torch.Tensor, config: AttentionConfig, headroom: float | None) -> bool:
        """Set open heads from `k` (already rotated) and `v`, each [T, Hkv, D]; True when the layer froze just now."""
        for values, scale, still_open, form in (
            (k, self.k, self._open_k, config.qk_format),
            (v, self.v, self._open_v, config.v_format),
        ):
            if form == "none":
                still_open.zero_()
                continue
            finite = torch.where(torch.isfinite(values), values, 0).abs().amax(dim=(0, 2)).to(torch.float32)
            ready = still_open & (finite > 0)
            scale.copy_(torch.where(ready, calibrated(finite, values.shape[0], form, headroom), scale))
            still_open &= ~ready
        self.frozen = not bool((self._open_k | self._open_v).any())
        self.source = "calibrated"
        return self.frozen


class ScaleStore:
    """The scales of every layer of one engine, with the file they come from or go to.

    finite: whether every value that any layer wrote to the engine's cache was finite. One flag for all layers, since an
    engine may hand the blocks of one layer to another.
    """

    def __init__(
        self, config: AttentionConfig, load: str | None = None, save: str | None = None, headroom: float | None = None
    ) -> None:
        self.config, self.headroom, self.save_path = config, headroom, save
        self.finite = True
        self._layers: dict[str, LayerScales] = {}
        self._file = read(load, config) if load else None
        self._load_path = load

    def layer(
        self,
        name: str,
        heads: int,
        checkpoint: tuple[float, float] | None = None,
        device: torch.device | str = "cpu",
    ) -> LayerScales:
        """Scales of layer `name`; `checkpoint` holds its per-tensor (k, v) FP8 scales where the checkpoint has some."""
        scales = self._layers.get(name)
        if scales is None:
            scales = self._layers[name] = LayerScales(heads, device)
            if (known := self.known(name, heads, checkpoint)) is not None:
                scales.fix(*known)
                _log(name, scales)
        return scales

    def known(
        self, name: str, heads: int, checkpoint: tuple[float, float] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, str] | None:
        """(k, v, source) of layer `name` where nothing is to be calibrated, each [Hkv] or one value."""
        if self._file is not None:
            return *self._from_file(name, heads), f"file {self._load_path}"
        if checkpoint is None:
            return None
        # The checkpoint's is a maximum over 448; int8 codes end at 127.
        k = checkpoint[0] * LARGEST["fp8_e4m3"] / LARGEST[self.config.qk_format]
        return torch.tensor(k), torch.tensor(checkpoint[1]), "checkpoint"

    def adopt(self, name: str, k: float, v: float, tokens: int, source: str) -> None:
        """Keep the scales per tensor of a layer on a GPU, calibrated there from `tokens` tokens or known: log, save."""
        scales = self._layers[name] = LayerScales(1)
        scales.fix(torch.tensor(k), torch.tensor(v), source)
        if source == "calibrated":
            self._froze(name, scales, tokens)
        else:
            _log(name, scales)

    def calibrate(self, name: str, k: torch.Tensor, v: torch.Tensor) -> None:
        """Calibrate layer `name` from its first tokens; log and save when it froze."""
        scales = self._layers[name]
        if scales.calibrate(k, v, self.config, self.headroom):
            self._froze(name, scales, k.shape[0])

    def _froze(self, name: str, scales: LayerScales, tokens: int) -> None:
        counters.event("layers calibrated")
        _log(name, scales)
        if tokens < FEW_TOKENS and self.headroom is None:
            _warn_once(
                f"ZYFA: K and V scales were calibrated on {tokens} tokens and leave room for more; for the best "
                f"precision let the first prompt have {FEW_TOKENS} tokens or more, or load scales with ZYFA_SCALES"
            )
        if self.save_path:
            try:
                write(self.save_path, self._layers, self.config)
            except Exception as error:
                # A full disk must not end the requests that are running.
                logger.error("ZYFA_SAVE_SCALES=%s could not be written: %s", self.save_path, error)

    def check(self, name: str, heads: int) -> None:
        """Raises ConfigError unless the loaded file, if any, holds usable scales of layer `name`."""
        if self._file is not None:
            self._from_file(name, heads)

    def _from_file(self, name: str, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._file is not None
        found = []
        for kind in ("k_scale", "v_scale"):
            key = f"{name}.{kind}"
            if key not in self._file:
                raise ConfigError(f"ZYFA_SCALES={self._load_path} holds no {key}; it is for another model")
            value = self._file[key]
            if tuple(value.shape) not in ((heads,), (1,)):  # GPUs have one scale a tensor
                shape = tuple(value.shape)
                raise ConfigError(
                    f"ZYFA_SCALES={self._load_path}: {key} has shape {shape}, the model has {heads} KV heads"
                )
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise ConfigError(f"ZYFA_SCALES={self._load_path}: {key} holds values that are not positive numbers")
            found.append(value)
        return found[0], found[1]


def _facts(config: AttentionConfig) -> dict[str, str]:
    """What a scale depends on: K is scaled after its rotation, and by the largest value of its format."""
    return {"rotation": config.rotation, "qk_format": config.qk_format, "v_format": config.v_format}


def write(path: str, layers: dict[str, LayerScales], config: AttentionConfig) -> None:
    """Write the frozen layers to a safetensors file; the file appears whole or not at all."""
    from safetensors.torch import save_file

    tensors = {}
    for name, scales in layers.items():
        if scales.frozen:
            tensors[f"{name}.k_scale"], tensors[f"{name}.v_scale"] = scales.k.clone(), scales.v.clone()
    part = f"{path}.{os.getpid()}.part"
    save_file(tensors, part, metadata={"zyfa": json.dumps(_facts(config))})
    os.replace(part, path)


def read(path: str, config: AttentionConfig) -> dict[str, torch.Tensor]:
    """Read scales that `write` saved. Raises ConfigError where the file is none or was made for other numerics."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as stream:
            facts = json.loads((stream.metadata() or {}).get("zyfa", "{}"))
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}
        if not isinstance(facts, dict):
            raise ValueError("its metadata are not ZYFA's")
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"ZYFA_SCALES={path} is not a safetensors file of scales: {error}") from None
    for key, value in _facts(config).items():
        if facts.get(key) != value:
            raise ConfigError(f"ZYFA_SCALES={path} was made for {key}={facts.get(key)!r}; this run has {key}={value!r}")
    return tensors


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning(line)


def _log(name: str, scales: LayerScales) -> None:
    logger.info(
        "ZYFA scales of %s from %s: k %.3g to %.3g, v %.3g to %.3g",
        name, scales.source, scales.k.min(), scales.k.max(), scales.v.min(), scales.v.max(),
    )
