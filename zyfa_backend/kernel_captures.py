"""Captured queries, keys and values of a file, as inputs of a kernel's run."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np
import torch

from zyfa_backend.kernel_run import HEAD_DIM, Problem, RunError, quantize


def load(
    path: Path,
    layer: int | None,
    seq: int | None,
    context: int,
    causal: bool,
    lean: bool,
    window: int | None = None,
) -> list[Problem]:
    """q, k, v [tokens, heads, 128] of an .npz file; of several layers (`layer3.q`, `3/q`, `q_3`) the chosen one.

    The first `context` tokens are keys alone, the next `seq` (all without it) queries as well. A `softmax_scale` in the
    file is taken, else it is 1 / sqrt(128). Raises RunError.
    """
    where = repr(str(path))
    arrays, softmax_scale = _arrays(path, layer)
    for name, array in arrays.items():
        if array.ndim != 3 or array.shape[2] != HEAD_DIM or not array.size or array.dtype.kind not in "fiu":
            raise RunError(
                f"{name} in {where} is {array.dtype} {list(array.shape)}; wanted numbers [tokens, heads, {HEAD_DIM}]"
            )
        if not np.isfinite(array).all():
            wrong = int((~np.isfinite(array)).sum())
            raise RunError(f"{name} in {where} is not finite everywhere: {wrong} of {array.size} values are NaN or inf")
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    tokens, q_heads, _ = arrays["q"].shape
    if shapes["k"] != shapes["v"] or shapes["k"][0] != tokens or q_heads % shapes["k"][1]:
        raise RunError(
            f"q, k, v in {where} have shapes {shapes['q']}, {shapes['k']}, {shapes['v']}; wanted as many tokens in "
            "each, k like v, and query heads a multiple of KV heads"
        )
    end = tokens if seq is None else context + seq
    if not 0 <= context < end <= tokens:
        asked = f"context={context}" + ("" if seq is None else f" and seq={seq}")
        raise RunError(
            f"{asked} does not fit {where} with its {tokens} tokens: context is at least 0, seq at least 1, and their "
            f"sum at most {tokens}"
        )
    largest = float(torch.finfo(torch.bfloat16).max)
    for name, array in arrays.items():
        if (top := float(np.abs(array.astype(np.float64)).max())) > largest:
            raise RunError(f"{name} in {where} holds {top:.3g}; the kernels take bf16, {largest:.3g} at most")
    q, k, v = (torch.from_numpy(np.asarray(arrays[n], np.float32)).bfloat16()[:end] for n in "qkv")
    return quantize([(q[context:], k, v)], causal, lean, softmax_scale=softmax_scale, window=window)


def _arrays(path: Path, layer: int | None) -> tuple[dict[str, np.ndarray], float | None]:
    """The arrays q, k, v of a layer, and its softmax_scale if the file has one."""
    where = repr(str(path))
    try:
        opened = np.load(path)
        if isinstance(opened, np.ndarray):
            raise RunError(f"--input {where} holds one array without a name; wanted an archive with q, k and v")
        with opened as archive:
            names = list(archive.files)
            found: dict[str, dict[str, str]] = {}
            for key in names:
                words = [w for w in key.replace("/", " ").replace(".", " ").replace("_", " ").split() if w]
                which = [w for w in words if w in ("q", "k", "v")] or ["scale"] * ("scale" in words)
                if which:
                    number = "".join(c for w in words for c in w if c.isdigit())
                    found.setdefault(number, {})[which[0]] = key
            whole = [number for number, has in found.items() if {"q", "k", "v"} <= set(has)]
            layers = sorted(whole, key=lambda number: (len(number), number))
            if layer is not None:
                layers = [number for number in layers if number == str(layer)]
            if len(layers) != 1:
                wanted = "q, k and v" if layer is None else f"q, k and v of layer {layer}"
                several = f"; choose one of layers {', '.join(layers)} by --layer" if layers else ""
                shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
                raise RunError(f"--input {where} holds {shown or 'nothing'}; wanted {wanted}{several}")
            chosen = found[layers[0]]
            scale = _scale(archive[chosen["scale"]], f"{chosen['scale']} in {where}") if "scale" in chosen else None
            return {name: archive[chosen[name]] for name in "qkv"}, scale
    except RunError:
        raise
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error).partition(". ")[0]
        raise RunError(f"--input {where} is not readable as .npz: {reason}") from error


def _scale(array: np.ndarray, label: str) -> float:
    """softmax_scale, one positive finite number. Raises RunError."""
    wanted = "wanted one number, positive and finite"
    if array.shape not in ((), (1,)):
        raise RunError(f"{label} is {array.dtype} {list(array.shape)}; {wanted}")
    value = array.reshape(()).item()
    if array.dtype.kind not in "fiu":
        raise RunError(f"{label} is {value!r}; {wanted}")
    if not 0 < value < math.inf:
        raise RunError(f"{label} is {value}; it is positive and finite")
    return float(value)
