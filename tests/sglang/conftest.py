"""Tests of the SGLang plugin run where SGLang can be imported; `examples/setup_sglang_cpu.py` makes such a place."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
pytest.importorskip("sglang", reason="SGLang is not installed here; examples/setup_sglang_cpu.py installs it")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where the unit tests keep their tensors: `--device cuda` moves them to a GPU."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test means the switches that it sets itself."""
    for name in [name for name in os.environ if name.startswith("ZYFA_")]:
        monkeypatch.delenv(name)
