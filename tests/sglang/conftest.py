"""Tests of the SGLang plugin run where SGLang can be imported; elsewhere they are skipped and say so."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ABSENT = "SGLang is not installed here; examples/setup_sglang_cpu.py makes an environment that has it"


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip(ABSENT, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if importlib.util.find_spec("sglang") is None:
        return _Skipped.from_parent(parent, path=module_path)
    return None


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where the unit tests keep their tensors: `--device cuda` moves them to a GPU."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test means the switches that it sets itself."""
    for name in [name for name in os.environ if name.startswith("ZYFA_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_kernel_without_quantisation(request: pytest.FixtureRequest) -> None:
    """On a GPU the engine's backend serves what is not quantised."""
    import torch

    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    on_gpu = request.config.getoption("--device") != "cpu"
    if on_gpu and (parameters.get("cache") == torch.bfloat16 or request.node.get_closest_marker("unquantised")):
        pytest.skip("ZYFA has no kernel on a GPU for a cache that is not quantised")


def pytest_configure(config: pytest.Config) -> None:
    # Before SGLang is imported: it decides then which platform it runs on.
    if config.getoption("--device") == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    else:
        os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    config.addinivalue_line("markers", "unquantised: of a cache in the model's dtype, which ZYFA serves on a CPU alone")
