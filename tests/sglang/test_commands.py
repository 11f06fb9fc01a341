"""`zyfa doctor` and `zyfa compare` where SGLang is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
VERSION = importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else ""


def zyfa(*arguments: str, **environment: str) -> dict:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ZYFA_")} | environment
    command = [sys.executable, "-m", "zyfa_backend.cli", *arguments, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_doctor_says_that_sglang_is_ready_and_why_not() -> None:
    def sglang(report: dict) -> dict:
        return next(engine for engine in report["engines"] if engine["name"] == "sglang")

    found = sglang(zyfa("doctor"))
    assert (found["installed"], found["device"], found["ready"]) == (VERSION, "cpu", True), found
    assert found["entry_points"] == {"sglang.srt.plugins": True}
    left_out = sglang(zyfa("doctor", SGLANG_PLUGINS="other"))
    assert left_out["problems"] == ["SGLANG_PLUGINS=other keeps zyfa from being loaded; add zyfa to it or unset it"]


def test_compare_serves_with_sglang(tmp_path) -> None:
    from zyfa_backend.models.make import make

    model = make("tiny-qwen3", tmp_path / "tiny-qwen3")["path"]
    size = ("--tokens=600", "--context=300", "--prompts=2", "--max-tokens=8", "--top-k=512")
    found = zyfa("compare", str(model), "--engine=sglang", "--variants=lean", f"--out={tmp_path / 'out'}", *size)
    baseline, lean = found["variants"]
    assert (baseline["name"], baseline["kernel"], baseline["engine"]) == ("baseline", "torch_native", "SGLang")
    assert baseline["engine_version"] == VERSION
    assert set(lean["kernels"]) == {
        "torch/fp8-hd128-causal-lean", "torch/fp8-hd128-decode-lean", "torch/rotate-quantize-hd128"
    }
    # Two layers prefill each window and prompt, and what compare asks to warm up.
    assert lean["kernels"]["torch/fp8-hd128-causal-lean"]["tokens"] >= 2 * (600 + 2 * 150)
    assert 0 < lean["kl"] < 0.1
    assert lean["command"].count("--attention-backend zyfa --kv-cache-dtype fp8_e4m3") == 1
    assert f"SGLang {VERSION}" in Path(found["files"]["report"]).read_text()
