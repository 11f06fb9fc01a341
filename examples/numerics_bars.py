#!/usr/bin/env python3
"""Measures what each choice of the numerics costs, on the attention inputs of a real model.

    python examples/numerics_bars.py CAPTURE.npz [--sweep] [--json]
    python examples/numerics_bars.py MODEL_DIRECTORY [--tokens 2048] [--text FILE] [--sweep] [--json]

CAPTURE is what `zyfa capture` writes; of a checkpoint, one is made first. All errors are relative RMS errors of one
causal attention call over all heads, and the RMS of that over the captured layers. "P" errors are against fp64
attention on the same quantised inputs; "input" errors are those of attention with unrounded P on quantised inputs,
against the same on unquantised ones.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from zyfa_backend import oracle, reference
from zyfa_backend.config import EXACT, LEAN, UNQUANTIZED, AttentionConfig
from zyfa_backend.quantization import Quantized, calibrate_scale, quantize_kv, quantize_q

DELTAS = [-0.6, -0.55, -0.5, -0.475, -0.45, -0.425, -0.4, -0.375, -0.344, -0.3, -0.2, 0.0]
AITER = "P of the AITER v3 model"
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]


def load(path: Path) -> dict[int, Layer]:
    """q [T, Hq, D], k, v [T, Hkv, D] in bf16 and the softmax scale of each captured layer."""
    with numpy.load(path) as file:
        numbers = sorted(int(name[len("layer") : -len(".q")]) for name in file if name.endswith(".q"))
        return {
            n: (
                *(torch.from_numpy(file[f"layer{n}.{x}"]).bfloat16() for x in "qkv"),
                float(file[f"layer{n}.softmax_scale"]),
            )
            for n in numbers
        }


def operands(layer: Layer, config: AttentionConfig) -> tuple[Quantized, Quantized, Quantized]:
    """Q per token and head, K and V per head."""
    q, k, v, _ = layer
    stored = []
    for x, form, rotation in ((k, config.qk_format, config.rotation), (v, config.v_format, "none")):
        scale = torch.tensor(1.0) if form == "none" else calibrate_scale(x, format=form, rotation=rotation)
        stored.append(Quantized(quantize_kv(x, scale, form, rotation), scale, form))
    return quantize_q(q, config), stored[0], stored[1]


def attend(layer: Layer, quantised: tuple[Quantized, Quantized, Quantized], config: AttentionConfig) -> torch.Tensor:
    """Causal attention of the reference, out in fp32."""
    return reference.attend(
        *quantised, softmax_scale=layer[3], causal=True, config=config, out_dtype=torch.float32
    )[0]


def measure(layers: dict[int, Layer], deltas: Sequence[float] = ()) -> dict[str, Any]:
    """Errors by variant over the layers, the ratios that the project states, and the best of `deltas`."""
    roundings = {
        "P exact": EXACT,
        "P exact, B = 0": replace(EXACT, offset=0.0),
        "P exact, tile 128": replace(EXACT, tile=128),
        "P lean": LEAN,
        "P lean, B = 0": replace(LEAN, offset=0.0),
        "P lean, tile 128": replace(LEAN, tile=128),
        **{f"P lean, delta = {delta:g}": replace(LEAN, delta=delta) for delta in deltas},
    }
    inputs = {
        "input fp8, no rotation": replace(LEAN, rotation="none"),
        "input fp8, Hadamard": LEAN,
        "input fp8, signed Hadamard": replace(LEAN, rotation="signed"),
        "input fp8 Q and K only, Hadamard": replace(LEAN, v_format="none"),
        "input int8 Q and K only, Hadamard": replace(LEAN, qk_format="int8", v_format="none"),
        "input int8 Q and K, fp8 V, Hadamard": replace(LEAN, qk_format="int8"),
        "input V only": replace(LEAN, qk_format="none", rotation="none"),
    }
    errors: dict[str, list[float]] = {}

    def note(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
        errors.setdefault(name, []).append(oracle.relative_rms(out, expected))

    for number, layer in layers.items():
        print(f"layer {number}", file=sys.stderr)
        quantised = operands(layer, LEAN)
        exact, _ = oracle.attend_fp64(*quantised, softmax_scale=layer[3], causal=True)
        for name, config in roundings.items():
            note(name, attend(layer, quantised, config), exact)
        note(AITER, oracle.attend_aiter_v3(*quantised, softmax_scale=layer[3], causal=True), exact)
        plain = attend(layer, operands(layer, UNQUANTIZED), UNQUANTIZED)
        for name, config in inputs.items():
            note(name, attend(layer, operands(layer, config), UNQUANTIZED), plain)
        note("bf16 output alone", plain.bfloat16(), plain)
    rms = {name: math.sqrt(sum(e * e for e in values) / len(values)) for name, values in errors.items()}
    result: dict[str, Any] = {
        "layers": list(layers),
        "tokens": next(iter(layers.values()))[0].shape[0],
        "errors": rms,
        "by_layer": errors,
        "ratios": {
            "lean / exact": rms["P lean"] / rms["P exact"],
            "lean / AITER v3 model": rms["P lean"] / rms[AITER],
            "rotation / none": rms["input fp8, Hadamard"] / rms["input fp8, no rotation"],
            "int8 QK / fp8 QK": rms["input int8 Q and K only, Hadamard"] / rms["input fp8 Q and K only, Hadamard"],
        },
    }
    if deltas:
        result["best_delta"] = min(deltas, key=lambda delta: rms[f"P lean, delta = {delta:g}"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a capture (.npz) or a checkpoint directory")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--text", type=Path, help="text to capture; the shipped one by default")
    parser.add_argument("--sweep", action="store_true", help="also sweep delta")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        if options.source.is_dir():
            from zyfa_backend.compare.text import default_text, read_text
            from zyfa_backend.models.capture import capture

            text = read_text(options.text) if options.text else default_text()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "capture.npz"
                capture(options.source, text, None, path, options.tokens)
                layers = load(path)
        else:
            layers = load(options.source)
    except Exception as error:
        print(f"numerics_bars: error: {error}", file=sys.stderr)
        return 1
    result = measure(layers, DELTAS if options.sweep else ())
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{result['tokens']} tokens, layers {', '.join(map(str, result['layers']))}")
    for group in ("errors", "ratios"):
        print()
        for name, value in result[group].items():
            print(f"{name:42s} {value:8.4f}")
    if "best_delta" in result:
        print(f"\nbest delta {result['best_delta']:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
