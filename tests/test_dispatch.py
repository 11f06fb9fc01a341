"""Kernel choice by name, refusals, and counters that survive a killed process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import zyfa_backend
from zyfa_backend import dispatch
from zyfa_backend.config import EXACT, INT8, LEAN, UNQUANTIZED, AttentionConfig, ConfigError, parse
from zyfa_backend.settings import load
from zyfa_backend.stats import Counters


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (dispatch.Shape(128, 128), "torch/fp8-hd128-causal-lean"),
        (dispatch.Shape(128, 128, "full", EXACT), "torch/fp8-hd128-full-exact"),
        (dispatch.Shape(192, 128, "causal", EXACT), "torch/fp8-mla-causal-exact"),
        (dispatch.Shape(64, 64, "decode", INT8), "torch/int8-hd64-decode-lean"),
        (dispatch.Shape(128, 128, "causal", UNQUANTIZED, "bf16"), "torch/bf16-hd128-causal"),
    ],
)
def test_names_follow_the_contract(shape: dispatch.Shape, name: str) -> None:
    assert dispatch.select(shape) == name
    assert zyfa_backend.explain(shape).startswith(name + ": ")


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (dispatch.Shape(128, 128), "triton/fp8-hd128-causal-lean"),
        (dispatch.Shape(64, 64, "causal", INT8), "triton/int8-hd64-causal-lean"),
        (dispatch.Shape(128, 128, "decode", EXACT), "engine/fp8-hd128-decode"),
        (dispatch.Shape(128, 128, "decode", INT8), "triton/int8-hd128-decode-lean"),
        (dispatch.Shape(64, 64, "decode", replace(INT8, probabilities="exact")), "triton/int8-hd64-decode-exact"),
    ],
)
def test_on_a_gpu_only_fp8_is_decoded_by_the_engine(shape: dispatch.Shape, name: str) -> None:
    assert dispatch.select(shape, "cuda:0") == name
    assert zyfa_backend.explain(shape, "cuda:0").startswith(name + ": ")


@pytest.mark.parametrize(
    ("shape", "device", "words"),
    [
        (dispatch.Shape(80, 80), "cpu", ("80", "64, 96, 128, 192")),
        (dispatch.Shape(128, 64), "cpu", ("128/64", "192/128")),
        (dispatch.Shape(128, 128, "sideways"), "cpu", ("sideways", "causal, full, decode")),
        (dispatch.Shape(128, 128), "xpu:0", ("xpu:0", "cpu and cuda")),
        (dispatch.Shape(96, 96), "cuda", ("96/96", "64/64, 128/128, 192/128")),
        (dispatch.Shape(128, 128, "causal", UNQUANTIZED), "cuda:0", ("none", "cuda")),
        (dispatch.Shape(128, 128, "causal", parse("lean,tile=128")), "cuda", ("tile=128", "every 128", "leave it")),
        (dispatch.Shape(64, 64, "decode", parse("exact,arithmetic=fused")), "cuda", ("arithmetic=fused", "leave it")),
    ],
)
def test_refusals_name_value_and_what_is_accepted(shape, device: str, words: tuple[str, ...]) -> None:
    with pytest.raises(dispatch.Unsupported) as caught:
        dispatch.select(shape, device)
    for word in words:
        assert word in str(caught.value)
    assert zyfa_backend.explain(shape, device) == f"none: {caught.value}"


def test_kernels_lists_every_name_once() -> None:
    names = [kernel.name for kernel in dispatch.kernels()]
    assert len(names) == len(set(names)) == 12
    assert all(kernel.available for kernel in dispatch.kernels("cpu"))
    on_gpu = dispatch.kernels("cuda")
    assert [kernel.name for kernel in on_gpu if not kernel.available] == [
        f"triton/{form}-hd96-causal-{p}" for form, p in (("fp8", "lean"), ("fp8", "exact"), ("int8", "lean"))
    ]
    assert not any(kernel.available for kernel in dispatch.kernels("xpu"))


def test_counters_survive_sigkill(tmp_path) -> None:
    code = f"""
import os, sys
from zyfa_backend.stats import Counters
counters = Counters()
counters.write_to({str(tmp_path)!r})
for i in range(1000):
    counters.add("a/b", 3)
    counters.add("c", 1)
counters.event("saturated values", 5)
counters.event("saturated values", 6)
counters.add("a/b", 10**12)
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(pid, signal.SIGKILL)
    process.wait()
    (path,) = tmp_path.iterdir()
    assert path.name == f"stats-{pid}.json"
    document = json.loads(path.read_text())
    assert document["kernels"]["a/b"] == {"calls": 1001, "tokens": 3000 + 10**12}
    assert document["kernels"]["c"] == {"calls": 1000, "tokens": 1000}
    assert document["events"] == {"saturated values": 11}


def test_no_file_before_the_first_kernel(tmp_path) -> None:
    Counters().write_to(str(tmp_path / "new"))
    assert list((tmp_path / "new").iterdir()) == []


def test_parse_reads_presets_and_overrides() -> None:
    assert parse("lean") == LEAN
    assert parse("int8, rotation=signed,tile=128") == AttentionConfig(qk_format="int8", rotation="signed", tile=128)
    assert parse("lean,delta=-0.3").delta == -0.3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("leen", ("leen", "lean", "exact", "int8", "unquantized")),
        ("lean,tile", ("tile", "FIELD=VALUE")),
        ("lean,tiles=1", ("tiles=1", "tile", "rotation")),
        ("lean,tile=x", ("tile='x'", "int")),
        ("lean,tile=65", ("65", "64, 128")),
        ("lean,offset=9", ("9", "[-6, 8]")),
        ("lean,rotation=fast", ("fast", "hadamard, signed, none")),
    ],
)
def test_parse_errors_name_what_is_accepted(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ZYFA_FALLBACK", "yes", ("yes", "0 or 1")),
        ("ZYFA_HEADROOM", "0.5", ("0.5", "1 to 64")),
        ("ZYFA_HEADROOM", "much", ("much", "1 to 64")),
        ("ZYFA_SCALES", "/no/such/file", ("/no/such/file",)),
        ("ZYFA_SAVE_SCALES", "/no/such/dir/file", ("/no/such/dir/file", "directory")),
        ("ZYFA_CONFIG", "fast", ("ZYFA_CONFIG=fast", "lean")),
    ],
)
def test_switches_are_checked(name: str, value: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: value})
    for word in words:
        assert word in str(caught.value)
