"""The plugin as SGLang loads it: once, for real, and loud where it fails."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from zyfa_backend.sglang import registration

PROBE = """
import json, logging
logging.basicConfig(level=logging.ERROR)
from sglang.srt.plugins import load_plugins
import zyfa_backend.sglang
load_plugins()
zyfa_backend.sglang.register()
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
try:
    ATTENTION_BACKENDS["zyfa"](None)
    raised = ""
except Exception as error:
    raised = f"{type(error).__name__}: {error}"
lists = (ATTENTION_BACKEND_CHOICES, CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS)
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
