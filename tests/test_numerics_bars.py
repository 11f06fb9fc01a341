"""What the choices of the numerics are worth on a real model's activations: the project's bars."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from zyfa_backend.compare.text import default_text
from zyfa_backend.config import LEAN

pytestmark = pytest.mark.slow
# Values that lean P is worth at a few deltas; the default must not be beaten by a neighbour.
DELTAS = (-0.5, -0.475, -0.45, -0.425, -0.4, -0.344, 0.0)


def script() -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / "numerics_bars.py"
    spec = importlib.util.spec_from_file_location("numerics_bars", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(smollm2_hd128: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    from zyfa_backend.models.capture import capture

    path = tmp_path_factory.mktemp("capture") / "capture.npz"
    taken = capture(smollm2_hd128, default_text(), None, path, 2048)
    assert len(taken["layers"]) == 7
    return script().measure(script().load(path), DELTAS)


@pytest.mark.parametrize(
    "ratio,bar",
    [
        ("lean / exact", 1.36),
        ("lean / AITER v3 model", 0.45),
        ("rotation / none", 0.65),
        ("int8 QK / fp8 QK", 0.5),
    ],
)
def test_bars(measured: dict, ratio: str, bar: float) -> None:
    assert measured["ratios"][ratio] <= bar


def test_offset_and_tile(measured: dict) -> None:
    """B = 8 is what makes lean P possible; tiles of 128 cost next to nothing."""
    errors = measured["errors"]
    assert errors["P exact"] <= errors["P exact, B = 0"] < 0.5 * errors["P lean, B = 0"]
    assert errors["P lean, tile 128"] <= 1.05 * errors["P lean"]


def test_the_default_delta_is_the_best(measured: dict) -> None:
    assert measured["best_delta"] == LEAN.delta
