"""`zyfa doctor`: true about this machine, and about machines that lack things."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from zyfa_backend import cli, dispatch, doctor, settings
from zyfa_backend.doctor import Check, Engine


@pytest.fixture(scope="module")
def report():
    return doctor.examine({})


def test_json_is_one_document_with_the_contracts_keys(capsys):
    assert cli.run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"engines", "device", "kernels", "versions", "switches"} <= set(document)
    assert all({"name", "available", "reason"} == set(kernel) for kernel in document["kernels"])
    assert all(kernel["reason"] for kernel in document["kernels"])


def test_kernels_are_those_of_dispatch(report):
    expected = dispatch.kernels("cuda" if report["device"]["gpus"] else "cpu")
    assert [kernel["name"] for kernel in report["kernels"]] == [info.name for info in expected]


def test_versions_are_the_installed_ones(report):
    assert report["versions"]["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert report["versions"]["torch"] == metadata.version("torch")
    assert set(doctor.PACKAGES) < set(report["versions"])


def test_device_is_this_one(report):
    import torch

    kind = ("rocm" if torch.version.hip else "cuda") if torch.cuda.is_available() else "cpu"
    assert report["device"]["kind"] == kind
    assert len(report["device"]["gpus"]) == (torch.cuda.device_count() if kind != "cpu" else 0)
    flags = Path("/proc/cpuinfo").read_text()
    assert report["device"]["cpu"]["features"]["avx512f"] == ("avx512f" in flags.split())
    assert report["device"]["cpu"]["cores"] == os.cpu_count()


def test_an_engine_that_is_not_installed():
    check = doctor.check_engine(Engine("no_such_engine", (1,), (2,), "1", ("no.such.group",), ""), {})
    assert check == Check("no_such_engine", None, "1", False, None, {"no.such.group": False}, [])
    assert not check.ready


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An importable package `stubengine` with a version and entry points of choice; returns its check."""

    def make(version: str = "1.4.2+cpu", code: str = "", points: str = "", name: str = "stubengine") -> Check:
        (tmp_path / "stubengine.py").write_text(code)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        stub = Engine("stubengine", (1, 4), (1, 6), "1.4–1.5", ("stub.plugins",), "import stubengine; print('fine')")
        return doctor.check_engine(stub, {})

    return make


POINT = "[stub.plugins]\nzyfa = zyfa_backend.cli:main\n"


def test_an_engine_that_is_ready(engine):
    check = engine(points=POINT)
    assert (check.installed, check.importable, check.entry_points) == ("1.4.2+cpu", True, {"stub.plugins": True})
    assert check.problems == [] and check.ready


def test_an_engine_without_our_entry_point(engine):
    assert engine().problems == ["entry point zyfa of stub.plugins is not registered: install zyfa here"]


@pytest.mark.parametrize("version", ["1.3.9", "1.6.0", "2.0"])
def test_an_engine_out_of_range(engine, version):
    (problem,) = engine(version=version, points=POINT).problems
    assert problem == f"stubengine {version} is outside of the supported range 1.4–1.5"


@pytest.mark.parametrize("version", ["1.4", "1.5.99", "1.5.0rc1", "1.4.1.post2"])
def test_versions_in_range(engine, version):
    assert engine(version=version, points=POINT).ready


def test_an_engine_that_does_not_import(engine):
    check = engine(code="raise ImportError('libfoo.so is missing')", points=POINT)
    assert not check.importable and not check.ready
    assert check.problems == ["import fails: ImportError: libfoo.so is missing"]


def test_an_engine_that_kills_the_interpreter(engine):
    check = engine(code="import os; os.abort()", points=POINT)
    assert not check.importable and check.problems[0].startswith("import fails: ")


def test_an_engine_under_another_distribution_name(engine):
    (problem,) = engine(name="stubengine-cpu", points=POINT).problems
    assert "the distribution is stubengine-cpu" in problem


def test_a_plugin_list_that_leaves_zyfa_out(report):
    if not report["versions"]["vllm"]:
        pytest.skip("needs vLLM")
    check = doctor.check_engine(doctor.ENGINES[0], {"VLLM_PLUGINS": "lora_resolver"})
    assert any("VLLM_PLUGINS=lora_resolver keeps zyfa from being loaded" in problem for problem in check.problems)


FEATURES = {"avx512f": False}
VLLM = [Check("vllm", "0.32.0", "0.32–0.33", True, "cpu", {})]


def notes(kind: str, environ: dict[str, str], engines=VLLM, features=FEATURES) -> dict[str, tuple]:
    return {row["name"]: (row["value"], row["note"]) for row in doctor.switches(kind, engines, features, environ)}


def test_switches_that_are_set_are_shown_and_explained():
    rows = notes("cpu", {"ZYFA_CONFIG": "exact", "ZYFA_CONFG": "lean", "VLLM_API_KEY": "hunter2", "HOME": "/root"})
    assert rows["ZYFA_CONFIG"] == ("exact", settings.VARIABLES["ZYFA_CONFIG"])
    assert "typing error" in rows["ZYFA_CONFG"][1]
    assert rows["VLLM_API_KEY"][0] == "(set, not shown)"
    assert "HOME" not in rows


def test_switches_that_would_help_depend_on_the_machine():
    cpu, rocm = notes("cpu", {}), notes("rocm", {})
    assert "VLLM_CPU_KVCACHE_SPACE" in cpu and "--kv-cache-dtype" in cpu and "VLLM_ROCM_USE_AITER" not in cpu
    assert "VLLM_ROCM_USE_AITER" in rocm and "VLLM_CPU_KVCACHE_SPACE" not in rocm
    assert notes("rocm", {"VLLM_ROCM_USE_AITER": "1"})["VLLM_ROCM_USE_AITER"] == ("1", "set for the engine")
    assert "--kv-cache-dtype" not in notes("cpu", {}, features={"avx512f": True})
    assert "VLLM_ATTENTION_BACKEND" not in notes("cpu", {}, engines=[])


def test_doctor_works_with_no_engine_and_no_gpu_library():
    """In a process where torch, the engines and their helpers cannot be imported."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "sglang", "aiter", "triton", "transformers", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return real(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
from zyfa_backend import cli
sys.exit(cli.run(["doctor", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {engine["name"]: engine["installed"] for engine in document["engines"]} == {"vllm": None, "sglang": None}
    assert document["device"]["kind"] == "cpu" and document["kernels"]


def test_the_printed_report(capsys):
    doctor_command = sys.modules["zyfa_backend.commands.doctor"]
    doctor_command._print(
        {
            "versions": {"python": "3.11", "vllm": None},
            "device": {
                "cpu": {"name": "Some CPU", "cores": 2, "features": {"avx2": True, "avx512f": False}},
                "gpus": [{"name": "MI355X", "architecture": "gfx950", "memory_gib": 288.0}],
            },
            "engines": [
                {"name": "vllm", "installed": None, "supported": "0.32–0.33", "problems": []},
                {"name": "sglang", "installed": "0.5.1", "supported": "0.5.18–0.5.23", "device": None, "ready": False,
                 "problems": ["sglang 0.5.1 is outside of the supported range 0.5.18–0.5.23"]},
            ],
            "kernels": [{"name": "fp8-hd128-causal-lean", "available": False, "reason": "needs gfx950"}],
            "switches": [{"name": "ZYFA_CONFIG", "value": None, "note": "unset"}],
        }
    )  # fmt: skip
    printed = capsys.readouterr().out
    for said in ("vllm is not installed", "MI355X (gfx950), 288 GiB", "+avx2 -avx512f", "sglang 0.5.1: not ready",
                 "outside of the supported range", "needs gfx950"):  # fmt: skip
        assert said in printed
