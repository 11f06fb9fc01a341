"""`zyfa kernels check FILE` on variations of a kernel: `--as` runs them with late loads, `--strict` counts advice."""

from __future__ import annotations

import json
import re

import pytest
from zyfa_kernels.runtime.registry import kernel
from zyfa_kernels.runtime.toolchain import assemble

from zyfa_backend.cli import run as zyfa

LEAN, EXACT = "fp8-hd128-causal-lean", "fp8-hd128-causal-exact"


def written(path, text: str) -> str:
    path.write_bytes(assemble(text))
    return str(path)


def without(text: str, line: str) -> str:
    """The text without the first line that `line` matches."""
    found = re.search(line, text, re.MULTILINE)
    assert found
    return text[: found.start()] + text[found.end() :]


def checked(capsys, *arguments: str, status: int) -> dict:
    assert zyfa(["kernels", "check", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments: str) -> str:
    assert zyfa(["kernels", "check", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out and len(captured.err.strip().splitlines()) == 1
    return captured.err


def test_a_missing_barrier_that_only_a_run_finds(capsys, tmp_path):
    """Waves 0-3 no longer wait once more at their end: which waves those are follows from the arguments."""
    path = written(tmp_path / "mine.hsaco", without(kernel(LEAN).text(), r"^ *s_barrier +// waves 0-3 end one .*\n"))
    assert checked(capsys, path, status=0)["violations"] == []
    report = checked(capsys, path, "--as", LEAN, status=1)
    assert {v["rule"] for v in report["violations"]} == {"barrier"}
    assert {v["instruction"] for v in report["violations"]} == {"s_barrier"}
    assert {v["kernel"] for v in report["violations"]} == {LEAN}


def test_a_good_file_run_as_itself(capsys, tmp_path):
    path = written(tmp_path / "same.hsaco", kernel(LEAN).text())
    report = checked(capsys, path, "--as", LEAN, status=0)
    assert report["violations"] == [] and f"{LEAN}: also run with arguments" in report["notes"][-1]


def test_names_that_do_not_fit(capsys, tmp_path):
    text = kernel(LEAN).text()
    path = written(tmp_path / "same.hsaco", text)
    assert "--as 'mine' is not accepted; choose fp8-hd128-causal-exact, " in refused(capsys, path, "--as", "mine")
    assert "--as '' is not accepted" in refused(capsys, path, "--as", "")
    assert f"{LEAN!r} is a kernel of ours" in refused(capsys, LEAN, "--as", LEAN)
    line = refused(capsys, path, "--as", EXACT)
    assert "holds zyfa_fp8_hd128_causal_lean, not the kernel zyfa_fp8_hd128_causal_exact" in line
    smaller = text.replace("max_flat_workgroup_size: 512", "max_flat_workgroup_size: 256")
    assert smaller != text
    line = refused(capsys, written(tmp_path / "smaller.hsaco", smaller), "--as", LEAN)
    assert f"does not run as {LEAN}: block of 512 threads" in line


@pytest.fixture(scope="module")
def advised(tmp_path_factory) -> str:
    """A kernel that sets M0 right before a load into LDS: LLVM wants a wait state there."""
    text = kernel(LEAN).text()
    found = re.search(r"^ *s_add_u32 m0,.*\n( *s_nop 0.*\n)(?= *buffer_load_dwordx4)", text, re.MULTILINE)
    assert found
    mutated = text[: found.start(1)] + text[found.end(1) :]
    return written(tmp_path_factory.mktemp("advised") / "mine.hsaco", mutated)


def test_advice_counts_under_strict(capsys, advised):
    report = checked(capsys, advised, status=0)
    assert report["violations"] == [] and {a["rule"] for a in report["advice"]} == {"m0"}
    assert checked(capsys, advised, "--strict", status=1) == report
    assert zyfa(["kernels", "check", advised, "--strict"]) == 1
    assert "0 violations, 1 advice, " in capsys.readouterr().out
