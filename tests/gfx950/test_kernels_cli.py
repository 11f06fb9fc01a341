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
    part = output(capsys, "kernels", "run", LEAN, "--input", str(path), "--layer", "7", "--context", "30", "--seq", "9")
    assert part["rel_rms"] != result["rel_rms"]
    assert part["rel_rms"] == pytest.approx(part["rel_rms_reference"], rel=0.02)


def test_run_takes_a_capture_s_softmax_scale(capsys, tmp_path):
    """With a tiny scale all weights are alike, and the log-sum-exp of 40 keys is ln 40: the errors shrink."""
    rng = np.random.default_rng(0)
    arrays = {x: rng.standard_normal((40, 1, 128)).astype(np.float32) for x in "qkv"}
    np.savez(tmp_path / "usual.npz", **arrays)
    np.savez(tmp_path / "flat.npz", softmax_scale=np.float32(1e-6), **arrays)
    usual, flat = (
        output(capsys, "kernels", "run", "fp8-hd128-causal-exact", "--input", str(tmp_path / f"{name}.npz"))
        for name in ("usual", "flat")
    )
    # Weights that are powers of two need no rounding: what is left is the rounding of the output to bf16.
    assert flat["rel_rms"] < 0.003 < usual["rel_rms"]


def test_run_takes_batches_and_pages(capsys):
    arguments = ("--seq", "70,1,257", "--context", "0,300,5", "--q-heads", "3", "--input", "peaked")
    packed, paged, again = (
        output(capsys, "kernels", "run", LEAN, *arguments, *more) for more in ((), ("--page", "16"), ("--page", "128"))
    )
    for result in (packed, paged, again):
        assert result["beyond_bf16"] == 0 and result["lse_max_abs"] < 1e-5
        assert result["rel_rms"] == packed["rel_rms"] == pytest.approx(packed["rel_rms_reference"], rel=0.02)


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
