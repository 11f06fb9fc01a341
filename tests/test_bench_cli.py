"""`zyfa bench` on bad input and without a GPU: one line on stderr, nothing on stdout, nothing written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zyfa_backend import cli

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts=kernels"], "--parts kernels is not accepted; choose from kernel, sustained, captured, write, ser"),
        (["--parts="], "needs a CUDA or ROCm GPU"),
        (["--parts=,"], "--parts ',' is empty"),
        (["--parts=captured"], "the captured part needs --input"),
        (["--input=/no/such.npz"], "--input '/no/such.npz' is not a file"),
        (["--seq=1024,-1"], "--seq '1024,-1' is not accepted"),
        (["--seq=0"], "whole numbers from 1 to 1048576"),
        (["--seq=1e3"], "as in 1024,4096"),
        (["--seq=٣"], "is not accepted"),
        (["--seq=99999999999999999999"], "is not accepted"),
        (["--shapes=hd80"], "shape 'hd80' is not accepted; give hd64, hd128, mla"),
        (["--shapes=hd128:7/2"], "heads 7/2 are not accepted"),
        (["--shapes=hd128:0/0"], "heads 0/0 are not accepted"),
        (["--shapes=hd128:8"], "the form is QUERY/KV, as in 32/8"),
        (["--shapes=qwen3-8b:8/8"], "'qwen3-8b:8/8' is not accepted"),
        (["--write-shape=none"], "shape 'none' is not accepted"),
        (["--variants=fp4"], "variants fp4 are not known; choose from fp8-lean, fp8-exact, int8-lean, int8-ex"),
        (["--peers=fa4"], "peers fa4 are not known; choose from fa3-fp8"),
        (["--batch=0"], "--batch"),
        (["--launches=0"], "--launches"),
        (["--launches=4", "--repeats=5"], "--repeats 5 is more than --launches 4"),
        (["--block-size=24"], "--block-size 24 is not accepted; choose 16, 32, 64, 128"),
        (["--sustain=nan"], "--sustain"),
        (["--warm-in=inf"], "--warm-in inf is not accepted"),
        (["--layers=x", "--parts=kernel"], "--layers 'x' is not accepted"),
        (["--parts=serving", "--models=gpt-2"], "there is no model preset 'gpt-2'; choose from deepseek-v2-lite, mist"),
        (["--parts=serving", "--models=../mistral-7b-v0.3"], "there is no model preset"),
        (["--parts=serving", "--serve=leen"], "serving variants leen are not known; choose from baseline, engine-fp8"),
        (["--parts=serving", "--define=x"], "'x' is not accepted; the form is --define"),
        (["--parts=serving", "--prompts=999999"], "prompts of 999999 tokens do not fit into 32768"),
        (["--parts=serving", "--server-arg='"], "--server-arg"),
        (["extra"], "extra"),
    ],
)
@WITHOUT_GPU
def test_bad_input_is_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["bench", *arguments]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and len(printed.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--parts=serving"], ["--parts=write", "--json"]])
@WITHOUT_GPU
def test_without_a_gpu(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["bench", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert "bench needs a CUDA or ROCm GPU" in printed.err and not list(tmp_path.iterdir())


@WITHOUT_GPU
def test_an_output_that_cannot_be_a_directory(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert cli.run(["bench", "--out", str(tmp_path / "file" / "below")]) == 2
    assert f"{tmp_path / 'file'} is not a directory" in capsys.readouterr().err


def test_help_names_the_parts(capsys):
    assert cli.run(["bench", "--help"]) == 0
    assert "sustained" in capsys.readouterr().out


@WITHOUT_GPU
def test_a_bad_input_is_told_before_a_gpu_is_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "single.npy", np.zeros(3))
    assert cli.run(["bench", "--input=single.npy"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert "--input 'single.npy' holds a single array" in printed.err
    assert cli.run(["bench", "--input=single.npy", "--parts=kernel"]) == 1
    assert "needs a CUDA or ROCm GPU" in capsys.readouterr().err
