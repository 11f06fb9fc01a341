"""What the tuning script chooses, on times made up for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton")


def script():
    path = Path(__file__).resolve().parents[2] / "examples" / "tune_prefill.py"
    spec = importlib.util.spec_from_file_location("tune_prefill", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_best_is_the_smallest_geometric_mean():
    """1 · 9 < 2 · 5 < 4 · 4: neither the best at the first length nor at the second decides alone."""
    first, near = script().best({0: [4.0, 4.0], 1: [2.0, 5.0], 2: [1.0, 9.0], 3: [1.0, 9.2]})
    assert first == 2 and near == [3]


def test_every_combination_is_tried_once():
    found = script().schedules()
    assert len(found) == 3 * 3 * 2 and len({tuple(x.items()) for x in found}) == len(found)
