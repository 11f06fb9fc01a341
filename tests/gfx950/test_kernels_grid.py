"""The grid of shapes and inputs (examples/gfx950_grid.py): a small part of it, and its recorded result."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest

from zyfa_backend import kernel_run

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--seqs", "1,65,130", "--heads", "3/1", "--contexts", "0,77", "--every-pair"]


@pytest.fixture(scope="module")
def grid():
    spec = importlib.util.spec_from_file_location("gfx950_grid", EXAMPLES / "gfx950_grid.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gfx950_grid"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_small_part_passes_and_is_not_run_twice(grid, tmp_path, capsys, monkeypatch):
    out = tmp_path / "grid.json"
    arguments = [*SMALL, "--kernels", "fp8-hd128-causal-lean,fp8-hd128-full-exact", "--out", str(out), "--json"]
    assert grid.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    # 2 kernels, 3 inputs, 3 lengths with 2 contexts and a batch, packed and paged
    assert result["cases"] == 2 * 3 * (3 * 2 + 2) and result["missed"] == []
    assert result["largest_rel_rms_deviation"] < 0.001 and result["largest_ones_max_abs"] == 0
    written = out.read_text()
    monkeypatch.setattr(kernel_run, "compare", None)
    assert grid.main(arguments) == 0 and out.read_text() == written


def test_a_miss_is_an_exit_status_and_a_line(grid, tmp_path, capsys, monkeypatch):
    compare = kernel_run.compare

    def worse(*arguments):
        result = compare(*arguments)
        return result | {"rel_rms": result["rel_rms_reference"] * 1.021}

    monkeypatch.setattr(kernel_run, "compare", worse)
    one = ["--seqs", "1", "--heads", "1/1", "--contexts", "77", "--inputs", "gaussian"]
    assert grid.main([*one, "--kernels", "fp8-hd128-causal-lean", "--out", str(tmp_path / "x.json")]) == 1
    assert "1 missed" in capsys.readouterr().out


def test_other_files_stay(grid, tmp_path, capsys):
    path = tmp_path / "notes.json"
    path.write_text("{}")
    assert grid.main(["--out", str(path), "--fresh"]) == 2
    assert path.read_text() == "{}" and str(path) in capsys.readouterr().err


def test_the_recorded_result_is_of_these_kernels_and_complete(grid):
    """After a change of the kernels: examples/gfx950_grid.py --every-pair --out examples/results/gfx950_grid.json"""
    document = json.loads((EXAMPLES / "results" / "gfx950_grid.json").read_text())
    options = grid.arguments(["--every-pair"])
    assert document["kernels"] == grid.fingerprints(options.kernels)["kernels"]
    done = grid.read(EXAMPLES / "results" / "gfx950_grid.json", document)
    assert set(grid.cases(options)) <= set(done)
    single = {(c.kernel, c.input, c.seq, c.heads, c.context) for c in done if "," not in c.seq}
    kernels = [f"fp8-hd128-{mask}-{p}" for mask in ("causal", "full") for p in ("exact", "lean")]
    seqs = ("1", "63", "64", "65", "255", "256", "257", "1000", "2048")
    heads, contexts = ("1/1", "4/1", "3/1", "9/3"), ("0", "1", "77", "512")
    assert single == set(itertools.product(kernels, ("gaussian", "peaked", "ones"), seqs, heads, contexts))
    assert all(figures["passed"] for figures in done.values())
    for case, figures in done.items():
        if case.input == "ones":
            assert figures["max_abs"] == 0 and figures["rel_rms"] < 1e-12
        else:
            assert figures["rel_rms"] == pytest.approx(figures["rel_rms_reference"], rel=0.02)
        assert figures["beyond_bf16"] == 0 and figures["lse_max_abs"] < 1e-3
