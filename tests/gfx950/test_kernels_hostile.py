"""`zyfa kernels` on bad input: one line on stderr that names the value, exit status 2, nothing on stdout."""

from __future__ import annotations

import ctypes.util
import sys

import numpy as np
import pytest
from zyfa_kernels.runtime.cache import code_object

from zyfa_backend.cli import run as zyfa

LEAN = "fp8-hd128-causal-lean"
RUN = ["run", LEAN]


def refused(capsys, *arguments: str, status: int = 2) -> str:
    """The one line that a command ends with."""
    assert zyfa(["kernels", *arguments]) == status
    captured = capsys.readouterr()
    assert not captured.out and len(captured.err.strip().splitlines()) == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "fp8-hd999"], "no kernel is named 'fp8-hd999'; there are fp8-hd128-causal-exact"),
        (["build", "nothing"], "no kernel is named 'nothing'"),
        (["build", LEAN, "--out", ""], "--out '' is not accepted; give the path of a folder, or . for the current one"),
        (["check", "/nowhere.co"], "'/nowhere.co' is neither a readable file (No such file or directory) nor one of"),
        (["cycles", "/tmp"], "'/tmp' is neither a readable file (Is a directory)"),
        (["cycles", LEAN, "--picture", "loop.txt"], "'loop.txt' is not accepted; a .png or .svg"),
        (["cycles", LEAN, "--picture", "/nowhere/loop.png"], "'/nowhere/loop.png' is not accepted"),
        ([*RUN, "--full"], "it runs with --causal"),
        ([*RUN, "--q-heads", "3", "--kv-heads", "2"], "q_heads=3 is not a multiple of kv_heads=2"),
        ([*RUN, "--q-heads", "390", "--kv-heads", "2"], "q_heads=390 with kv_heads=2 is not accepted: the"),
        ([*RUN, "--q-heads", "0"], "q_heads=0 is not accepted; it lies in 1 .. 1024"),
        ([*RUN, "--kv-heads", "-1"], "kv_heads=-1 is not accepted"),
        ([*RUN, "--q-heads", "2000"], "q_heads=2000 is not accepted"),
        ([*RUN, "--seq", "0"], "seq=0 is not accepted; it lies in 1 .."),
        ([*RUN, "--seq", "99999999999"], "seq=99999999999 is not accepted"),
        ([*RUN, "--seq", "1.5"], "--seq '1.5' is not accepted; give a whole number"),
        ([*RUN, "--seq", "3,,4"], "'3,,4'"),
        ([*RUN, "--seq", "3,4", "--context", "1,2,3"], "--context has 3 numbers and --seq 2"),
        ([*RUN, "--context", "-1"], "context=-1 is not accepted; it lies in 0 .."),
        ([*RUN, "--context", "9" * 30], "is not accepted; it lies in 0 .."),
        ([*RUN, "--seed", "-1"], "seed=-1 is not accepted"),
        ([*RUN, "--page", "12"], "page=12 is not accepted; a power of two from 8 on is"),
        ([*RUN, "--page", "0"], "page=0 is not accepted"),
        ([*RUN, "--window", "-1"], "window=-1 is not accepted; it lies in 0 .."),
        ([*RUN, "--layer", "1"], "--layer 1 goes with an .npz file"),
        ([*RUN, "--input", "noise"], "'noise' is not accepted; choose gaussian, peaked, ones"),
        ([*RUN, "--input", "missing.npz"], "'missing.npz' is not readable as .npz: No such file or directory"),
        ([*RUN, "--on", "tpu"], "'tpu' is not accepted; choose emulator or gpu"),
        ([*RUN, "--json", "--seq", "0"], "seq=0"),
        (["check"], "Missing argument"),
    ],
)
def test_arguments(capsys, arguments, says):
    assert says in refused(capsys, *arguments)


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Files that are no code object of gfx950."""
    folder, good = tmp_path_factory.mktemp("objects"), code_object(LEAN)
    damaged = bytearray(good)
    damaged[0x1C00:0x1C40] = b"\xff" * 0x40
    other = bytearray(good)
    other[48] = 0x4C  # e_flags: gfx942
    for name, data in {
        "empty": b"",
        "text": b"not an ELF\n" * 100,
        "header": good[:64],
        "half": good[: len(good) // 2],
        "damaged": damaged,
        "gfx942": other,
        "python": open(sys.executable, "rb").read(),
    }.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("command", ["check", "cycles"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty", "not an ELF file"),
        ("text", "not an ELF file (it starts with b'not ')"),
        ("header", "a damaged or incomplete code object"),
        ("half", "a damaged or incomplete code object"),
        ("damaged", "no gfx950 encoding matches word 0xffffffff"),
        ("gfx942", "built for gfx942, want gfx950"),
        ("python", "want 224 (AMDGPU)"),
    ],
)
def test_files_that_are_no_code_object(capsys, objects, command, name, says):
    path = str(objects / name)
    line = refused(capsys, command, path)
    assert path in line and says in line


def test_an_output_that_is_no_folder(capsys, tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    assert repr(str(path)) in refused(capsys, "build", LEAN, "--out", str(path))
    assert path.read_text() == "kept"


def arrays(tokens: int = 4, q_heads: int = 1, kv_heads: int = 1, dim: int = 128) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads = {"q": q_heads, "k": kv_heads, "v": kv_heads}
    return {name: rng.standard_normal((tokens, n, dim)).astype(np.float32) for name, n in heads.items()}


def with_nan() -> dict[str, np.ndarray]:
    out = arrays()
    out["k"][1, 0, 5] = np.nan
    return out


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ({"a": np.zeros(3)}, [], "holds a; wanted q, k and v"),
        ({"q": np.zeros((1, 1, 128))}, [], "holds q; wanted q, k and v"),
        (arrays(dim=64), [], "q in {path} is float32 [4, 1, 64]; wanted numbers [tokens, heads, 128]"),
        ({n: a[:, 0] for n, a in arrays().items()}, [], "[4, 128]; wanted numbers [tokens, heads, 128]"),
        (arrays(tokens=0), [], "[0, 1, 128]; wanted numbers"),
        (with_nan(), [], "k in {path} is not finite everywhere: 1 of 512"),
        ({**arrays(), "k": np.full((4, 1, 128), 1e60)}, [], "k in {path} holds 1e+60; the kernels take bf16, 3.39e+38"),
        (arrays(q_heads=3, kv_heads=2), [], "shapes [4, 3, 128], [4, 2, 128], [4, 2, 128]"),
        (arrays() | {"k": np.zeros((5, 1, 128), np.float32)}, [], "shapes [4, 1, 128], [5, 1, 128], [4, 1, 128]"),
        (arrays() | {"q": np.array([{}], object)}, [], "Object arrays cannot be loaded"),
        (arrays() | {"softmax_scale": np.array(-1.0)}, [], "softmax_scale in {path} is -1.0; it is positive"),
        (
            arrays() | {"softmax_scale": np.full((1, 2), 0.1)},
            [],
            "softmax_scale in {path} is float64 [1, 2]; wanted one number, positive and finite",
        ),
        (arrays() | {"softmax_scale": "0.1"}, [], "softmax_scale in {path} is '0.1'; wanted one number"),
        (arrays() | {"softmax_scale": True}, [], "softmax_scale in {path} is True; wanted one number"),
        (arrays() | {"softmax_scale": 0.1j}, [], "softmax_scale in {path} is 0.1j; wanted one number"),
        (
            {f"layer{n}.{x}": a for n in (10, 2, 1) for x, a in arrays().items()},
            [],
            "choose one of layers 1, 2, 10 by --layer",
        ),
        ({f"layer{n}.{x}": a for n in (1, 2) for x, a in arrays().items()}, [], "choose one of layers 1, 2 by --layer"),
        ({f"layer{n}.{x}": a for n in (1, 2) for x, a in arrays().items()}, ["--layer", "3"], "q, k and v of layer 3"),
        (arrays(), ["--seq", "5"], "seq=5 does not fit {path} with its 4 tokens"),
        (arrays(), ["--context", "4"], "context=4 does not fit {path}"),
        (arrays(), ["--seq", "1,2"], "a file is one sequence"),
        (arrays(), ["--kv-heads", "2"], "--kv-heads 2: "),
    ],
    ids=range(22),
)
def test_captures_that_do_not_fit(capsys, tmp_path, content, options, says):
    path = tmp_path / "x.npz"
    np.savez(path, **content)
    line = refused(capsys, *RUN, "--input", str(path), *options)
    assert says.format(path=repr(str(path))) in line and str(path) in line or "one sequence" in line


def test_scores_too_large_for_their_differences(capsys, tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, **{name: array * 1e4 for name, array in arrays().items()})
    assert "1.68e+07 is the most" in refused(capsys, *RUN, "--input", str(path))


@pytest.mark.parametrize("data", [b"", b"text", b"PK\x03\x04" + bytes(50)])
def test_captures_that_are_no_archive(capsys, tmp_path, data):
    path = tmp_path / "x.npz"
    path.write_bytes(data)
    assert f"{str(path)!r} is not readable as .npz" in refused(capsys, *RUN, "--input", str(path))


def test_without_a_gpu_the_gpu_run_says_what_is_missing(capsys):
    if ctypes.util.find_library("amdhip64"):
        pytest.skip("a HIP runtime is installed")
    assert "libamdhip64" in refused(capsys, *RUN, "--on", "gpu", status=1)
    assert "libamdhip64" in refused(capsys, *RUN, "--on", "gpu", "--json", status=1)


def test_a_package_of_the_extra_that_is_missing(capsys, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("zyfa_kernels.emulator")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    assert "needs elftools" in refused(capsys, "check", LEAN, status=1)
