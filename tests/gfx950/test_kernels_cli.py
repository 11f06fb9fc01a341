"""`zyfa kernels`: the contract of names and JSON keys, and errors in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from zyfa_backend.cli import run as zyfa

LEAN = "fp8-hd128-causal-lean"


def output(capsys, *arguments: str) -> dict:
    assert zyfa([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_names_every_kernel_with_its_resources(capsys):
    rows = {row["name"]: row for row in output(capsys, "kernels", "list")["kernels"]}
    assert {f"fp8-hd128-{m}-{p}" for m in ("causal", "full") for p in ("lean", "exact")} <= set(rows)
    row = rows[LEAN]
    assert (row["qk_dim"], row["v_dim"], row["format"], row["waves"]) == (128, 128, "fp8_e4m3", 8)
    assert row["vgprs"] <= 256 and row["lds_bytes"] <= 160 * 1024


def test_build_writes_text_and_code_object(capsys, tmp_path):
    files = output(capsys, "kernels", "build", LEAN, "--out", str(tmp_path / "new"))["files"]
    assert [f.rsplit(".", 1)[1] for f in files] == ["s", "hsaco"]
    text = (tmp_path / "new" / f"{LEAN}.s").read_text()
    assert "Vector registers" in text and "matrix phase" in text
    assert (tmp_path / "new" / f"{LEAN}.hsaco").read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("kind", ["gaussian", "peaked", "ones"])
def test_run_reports_errors_against_the_reference(capsys, kind):
    arguments = ("--seq", "65", "--q-heads", "3", "--kv-heads", "1", "--causal", "--context", "77", "--input", kind)
    result = output(capsys, "kernels", "run", LEAN, *arguments, "--on", "emulator")
    assert {"rel_rms", "rel_rms_reference", "max_abs", "lse_max_abs", "instructions", "seconds"} <= set(result)
    if kind == "ones":
        assert result["rel_rms"] < 1e-12 and result["max_abs"] == 0
    else:
        assert result["rel_rms"] == pytest.approx(result["rel_rms_reference"], rel=0.02)
    # 3 heads x 8 waves, two tiles; 300 instructions a tile and set-up: thousands, not millions
    assert 3 * 8 * 600 < result["instructions"] < 3 * 8 * 3000


def test_run_reads_captured_inputs_by_layer(capsys, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"layer{n}.{x}": rng.standard_normal((40, h, 128)).astype(np.float32)
        for n in (3, 7)
        for x, h in (("q", 2), ("k", 1), ("v", 1))
    }
    path = tmp_path / "captured.npz"
    np.savez(path, **arrays)
    result = output(capsys, "kernels", "run", LEAN, "--input", str(path), "--layer", "7")
    assert 0 < result["rel_rms"] < 0.06
    assert zyfa(["kernels", "run", LEAN, "--input", str(path)]) == 1
    assert "--layer" in capsys.readouterr().err


def test_check_and_cycles_take_a_name_or_a_file(capsys, tmp_path):
    checked = output(capsys, "kernels", "check", LEAN)
    assert checked["violations"] == [] and checked["bank_conflicts"] == 0
    assert checked["mfma"] == 90 and checked["instructions"] > 3000
    output(capsys, "kernels", "build", LEAN, "--out", str(tmp_path))
    picture = tmp_path / "loop.svg"
    modelled = output(capsys, "kernels", "cycles", str(tmp_path / f"{LEAN}.hsaco"), "--picture", str(picture))
    assert {"cycles_per_block", "matrix_busy", "vector_busy", "limiter", "predicted_fraction_of_peak"} <= set(modelled)
    assert modelled["modelled"] is True and 0.86 <= modelled["matrix_busy"] <= 1
    assert "<svg" in picture.read_text()


def test_a_file_that_is_no_code_object_is_named(capsys, tmp_path):
    path = tmp_path / "x.hsaco"
    path.write_bytes(b"not an ELF")
    assert zyfa(["kernels", "check", str(path)]) != 0
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "fp8-hd999"], "no kernel is named 'fp8-hd999'"),
        (["run", LEAN, "--full"], "it runs with --causal"),
        (["run", LEAN, "--q-heads", "3", "--kv-heads", "2"], "q_heads=3 is not a multiple of kv_heads=2"),
        (["run", LEAN, "--seq", "0"], "seq=0"),
        (["run", LEAN, "--input", "noise"], "'noise' is not accepted; choose gaussian, peaked, ones"),
        (["run", LEAN, "--input", "missing.npz"], "missing.npz"),
        (["run", LEAN, "--on", "tpu"], "choose emulator or gpu"),
        (["check", "/nowhere.hsaco"], "neither a readable file"),
        (["build", "nothing"], "no kernel is named"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, arguments, says):
    assert zyfa(["kernels", *arguments]) != 0
    captured = capsys.readouterr()
    assert says in captured.err and not captured.out
    assert len(captured.err.strip().splitlines()) == 1


def test_without_a_gpu_the_gpu_run_says_what_is_missing(capsys):
    import ctypes.util

    if ctypes.util.find_library("amdhip64"):
        pytest.skip("a HIP runtime is installed")
    assert zyfa(["kernels", "run", LEAN, "--on", "gpu"]) != 0
    assert "libamdhip64" in capsys.readouterr().err
