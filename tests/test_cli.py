"""What all commands promise: one clear line on bad input, JSON alone on stdout, a fast start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from zyfa_backend import cli
from zyfa_backend.commands import common


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"zyfa {metadata.version('zyfa')}\n"


def test_help_lists_the_commands(capsys):
    for arguments in ([], ["--help"]):
        assert cli.run(arguments) == 0
        printed = capsys.readouterr().out
        assert "compare" in printed and "doctor" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "frobnicate"),
        (["compare"], "model"),
        (["compare", "m", "--nonsense"], "--nonsense"),
        (["compare", "m", "--tokens=many"], "--tokens"),
        (["compare", "m", "--tokens=1"], "--tokens"),
        (["compare", "m", "--engine=tgi"], "--engine tgi is not accepted; compare serves with vllm, sglang"),
        (["compare", "m", "--variants=leen"], "unknown variant leen"),
        (["compare", "/no/such/model"], "/no/such/model is not a directory"),
        (["compare", "m", "--text=/no/such/text"], "cannot read /no/such/text"),
        (["doctor", "extra"], "extra"),
    ],
)
def test_bad_input_is_one_line_on_stderr(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err and len(printed.err.splitlines()) == 1


def test_a_directory_that_is_no_checkpoint(tmp_path, capsys):
    assert cli.run(["compare", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_an_output_directory_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    assert cli.run(["compare", str(tmp_path), "--out", str(tmp_path / "file")]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error and len(error.splitlines()) == 1


def test_json_refuses_what_json_cannot_say(capsys):
    with pytest.raises(ValueError):
        common.print_json({"kl": float("nan")})
    assert capsys.readouterr().out == ""  # not half a document either
    common.print_json({"kl": 0.5})
    assert json.loads(capsys.readouterr().out) == {"kl": 0.5}


def test_the_installed_command_starts_without_the_heavy_packages():
    """Importing torch takes seconds; neither the version nor the help needs it."""
    code = (
        "import sys; from zyfa_backend import cli; cli.run(['compare', '--help']); "
        "print([m for m in ('torch', 'matplotlib', 'numpy', 'vllm', 'transformers', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-300:]


def test_a_reader_that_closes_the_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m zyfa_backend.cli --help | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert "Traceback" not in done.stderr
