"""The plugin as SGLang loads it: once, for real, and loud where it fails."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from zyfa_backend.sglang import cpu_indices, registration

PROBE = """
import json, logging
logging.basicConfig(level=logging.ERROR)
from sglang.srt.plugins import load_plugins
import zyfa_backend.sglang
load_plugins()
zyfa_backend.sglang.register()
try:
    from sglang.srt.arg_groups import choices
except ImportError:  # 0.5.18
    from sglang.srt import server_args as choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
try:
    ATTENTION_BACKENDS["zyfa"](None)
    raised = ""
except Exception as error:
    raised = f"{type(error).__name__}: {error}"
lists = (choices.ATTENTION_BACKEND_CHOICES, choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS)
print(json.dumps({"counts": [names.count("zyfa") for names in lists], "raised": raised}))
"""


def probe(**environment: str) -> tuple[dict, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, **environment}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_sglang_finds_the_plugin_by_its_entry_point_and_registers_it_once() -> None:
    found, log = probe()
    assert found["counts"] == [1, 1]
    # The factory is ZYFA's: it asks the runner, of which there is none.
    assert found["raised"] == "AttributeError: 'NoneType' object has no attribute 'use_mla_backend'"
    assert "ZYFA" not in log


@pytest.mark.slow
def test_a_failure_is_logged_and_meets_whoever_chooses_zyfa() -> None:
    found, log = probe(ZYFA_CONFIG="leen")
    assert found["counts"] == [1, 1]
    cause = "ZYFA_CONFIG=leen: 'leen' is not a preset; choose one of exact, lean, lean-no-rotation, int8, unquantized"
    assert found["raised"] == f"RegistrationError: zyfa was chosen, but could not be registered: {cause}"
    assert "ERROR:sglang.zyfa:ZYFA cannot serve in this process: ConfigError: " + cause in log


def test_an_sglang_without_the_lists_is_named(monkeypatch, caplog) -> None:
    def gone() -> None:
        raise ImportError("cannot import name 'ATTENTION_BACKEND_CHOICES'")

    monkeypatch.setattr(registration, "_add_choice", gone)
    with caplog.at_level(logging.ERROR):
        registration.register.__wrapped__()
    assert "ZYFA is not an attention backend of this SGLang: ImportError" in caplog.text
    assert "It supports SGLang 0.5.18 to 0.5.23" in caplog.text


@pytest.mark.parametrize("on_cpu", [True, False])
def test_on_a_cpu_0_5_18_fills_indices_without_triton(on_cpu, monkeypatch) -> None:
    """Its `support_triton` names two backends that do without; on a GPU it stays as it is."""
    from sglang.srt.mem_cache import allocation
    from sglang.srt.model_executor import forward_batch_info

    for module in (allocation, forward_batch_info):
        monkeypatch.setattr(module, "support_triton", lambda name: name not in ("torch_native", "intel_amx"))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1" if on_cpu else "0")
    cpu_indices.allow()
    cpu_indices.allow()
    for module in (allocation, forward_batch_info):
        assert [module.support_triton(name) for name in ("zyfa", "torch_native", "triton")] == [not on_cpu, False, True]
