"""Captured operands of a benchmark: what `zyfa capture` wrote, read and checked without a GPU."""

from __future__ import annotations

import re
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import BenchError
from .shapes import DIMS, LONGEST, MOST_HEADS, Problem, Shape

if TYPE_CHECKING:
    import torch

# What numpy and zipfile raise on files that are cut off, damaged or of another kind.
BROKEN = (OSError, EOFError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
WANTED = "give a file that `zyfa capture` wrote"
LAYER = re.compile(r"layer(0|[1-9]\d{0,5})\.q", re.ASCII)


def read(path: Path, causal: bool, layers: list[int] | None) -> list[Problem]:
    """The layers of an .npz that `zyfa capture` wrote, the chosen ones or all, as problems on the CPU.

    Of each layer n the file holds `layern.q` [T, Hq, D], `layern.k` [T, Hkv, D] and `layern.v` [T, Hkv, Dv], numbers
    after RoPE, and may hold `layern.softmax_scale`, one number, D^-0.5 without it. Raises BenchError.
    """
    with ExitStack() as opened:
        try:
            archive = np.load(opened.enter_context(open(path, "rb")))
        except BROKEN as error:
            raise BenchError(f"--input {str(path)!r} is not readable as .npz: {error}; {WANTED}") from None
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise BenchError(f"--input {str(path)!r} holds a single array, not an .npz archive; {WANTED}")
        there = sorted(int(name[1]) for key in archive.files if (name := LAYER.fullmatch(key)))
        if not there:
            raise BenchError(f"--input {str(path)!r} holds no layerN.q; {WANTED}")
        missing = [layer for layer in layers or [] if layer not in there]
        if missing:
            raise BenchError(f"--layers {missing} are not in {str(path)!r}; it holds {', '.join(map(str, there))}")
        return [_problem(archive, path, layer, causal) for layer in layers or there]


def _problem(archive: Any, path: Path, layer: int, causal: bool) -> Problem:
    q, k, v = (_tensor(archive, path, layer, name) for name in "qkv")
    dims = next((name for name, pair in DIMS.items() if pair == (q.shape[2], v.shape[2])), None)
    if dims is None or k.shape[2] != q.shape[2] or k.shape[:2] != v.shape[:2] or k.shape[0] != q.shape[0]:
        widths = ", ".join(f"{a}/{b}" for a, b in DIMS.values())
        raise BenchError(
            f"layer {layer} of {str(path)!r} has q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected "
            f"q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] with D/Dv of {widths}"
        )
    tokens, q_heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    if not 1 <= tokens <= LONGEST:
        raise BenchError(f"layer {layer} of {str(path)!r} has {tokens} tokens; 1 to {LONGEST} are accepted")
    if not 1 <= kv_heads <= q_heads <= MOST_HEADS or q_heads % kv_heads:
        raise BenchError(
            f"layer {layer} of {str(path)!r} has {q_heads}/{kv_heads} heads; query heads are a multiple of the KV "
            f"heads, 1 to {MOST_HEADS}"
        )
    if not v.any():
        raise BenchError(f"layer{layer}.v of {str(path)!r} is zero throughout; expected values to compare results by")
    shape = Shape(dims, q_heads, kv_heads, tokens, 1, causal, f"{path.stem} layer {layer}")
    return Problem(shape, q, k, v, _scale(archive, path, layer, q.shape[2]))


def _tensor(archive: Any, path: Path, layer: int, name: str) -> torch.Tensor:
    import torch

    key = f"layer{layer}.{name}"
    array = _array(archive, path, key)
    if array.ndim != 3 or array.dtype.kind not in "fiu":
        raise BenchError(
            f"{key} of {str(path)!r} is {list(array.shape)} {array.dtype}; expected numbers [tokens, heads, D]"
        )
    with np.errstate(over="ignore"):  # told below
        tensor = torch.from_numpy(array.astype(np.float32)).bfloat16()
    lost = tensor.numel() - int(tensor.isfinite().sum())
    if lost:
        raise BenchError(f"{key} of {str(path)!r} has {lost} values that are NaN or infinite in bf16; expected none")
    return tensor


def _scale(archive: Any, path: Path, layer: int, dim: int) -> float:
    key = f"layer{layer}.softmax_scale"
    if key not in archive.files:
        return float(dim**-0.5)
    array = _array(archive, path, key)
    if array.size != 1 or array.dtype.kind not in "fiu":
        raise BenchError(f"{key} of {str(path)!r} is {list(array.shape)} {array.dtype}; expected one number")
    value = float(array.item())
    with np.errstate(over="ignore", under="ignore"):
        usable = 0 < np.float32(value) < np.inf  # the kernels take it in fp32
    if not usable:
        raise BenchError(f"{key} of {str(path)!r} is {value:g}; expected a positive number that is finite in fp32")
    return value


def _array(archive: Any, path: Path, key: str) -> Any:
    if key not in archive.files:
        raise BenchError(f"--input {str(path)!r} holds no {key}; {WANTED}")
    try:
        array = archive[key]
    except BROKEN as error:
        raise BenchError(f"{key} of {str(path)!r} is not readable: {error}; {WANTED}") from None
    if not isinstance(array, np.ndarray):
        raise BenchError(f"{key} of {str(path)!r} is not an array; {WANTED}")
    return array
