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


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_captured_operands(tmp_path):
    from zyfa_backend.bench.errors import BenchError
    from zyfa_backend.bench.shapes import captured

    make = np.random.default_rng(0)
    q, k = make.normal(size=(9, 4, 128)).astype(np.float32), make.normal(size=(9, 2, 128)).astype(np.float32)
    good = save(
        tmp_path / "taken.npz",
        **{f"layer{n}.{name}": x * (n + 1) for n in (0, 3) for name, x in (("q", q), ("k", k), ("v", k))},
        **{"layer3.softmax_scale": np.float32(0.25)},
    )
    both = captured(good, True, None, device="cpu")
    assert [problem.softmax_scale for problem in both] == [128**-0.5, 0.25]
    assert str(both[1].shape) == "taken layer 3 hd128 4/2 1x9 causal"
    assert torch.equal(both[1].q, torch.from_numpy(4 * q).bfloat16()) and both[0].k.shape == (9, 2, 128)
    for path, layers, said in (
        (good, [1], r"--layers \[1\] are not in .*; it holds 0, 3"),
        (save(tmp_path / "other.npz", x=q), None, "holds no layerN.q"),
        (save(tmp_path / "half.npz", **{"layer0.q": q}), None, "layer 0 of .* is not usable"),
        (save(tmp_path / "odd.npz", **{f"layer0.{n}": q[..., :80] for n in "qkv"}), None, "D of hd64, hd128, mla"),
    ):
        with pytest.raises(BenchError, match=said):
            captured(path, True, layers, device="cpu")
    (tmp_path / "text.npz").write_text("not an archive")
    with pytest.raises(BenchError, match="not readable as .npz"):
        captured(tmp_path / "text.npz", True, None, device="cpu")
