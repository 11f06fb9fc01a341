"""Code objects on disk: damaged ones are assembled anew, and files appear whole or not at all."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager

import pytest
from zyfa_kernels.emulator import CodeObject
from zyfa_kernels.runtime import cache
from zyfa_kernels.runtime.registry import kernel
from zyfa_kernels.runtime.toolchain import assemble

from zyfa_backend.cli import run as zyfa

LEAN = "fp8-hd128-causal-lean"


@pytest.fixture(scope="module")
def good() -> bytes:
    return assemble(kernel(LEAN).text())


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ZYFA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextmanager
def full_disk(limit: int):
    """Files can't grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def truncate(data: bytes) -> bytes:
    return data[:4000]


def flip(data: bytes) -> bytes:
    """One bit of the code: still an ELF of the right size."""
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("damage", [truncate, flip, lambda data: b""])
def test_a_damaged_file_is_assembled_anew(folder, tmp_path, good, damage):
    assert cache.code_object(LEAN) == good
    (path,) = folder.iterdir()
    path.write_bytes(damage(good))
    out = tmp_path / "out"
    assert zyfa(["kernels", "build", LEAN, "--out", str(out)]) == 0
    assert (out / f"{LEAN}.hsaco").read_bytes() == good
    assert list(folder.iterdir()) == [path] and path.read_bytes() == good
    assert CodeObject.load(cache.code_object(LEAN)).kernels


def test_a_good_file_is_not_assembled_again(folder, good, monkeypatch):
    cache.code_object(LEAN)

    def assembles(text: str) -> bytes:
        raise AssertionError("assembled though it is there")

    monkeypatch.setattr(cache, "assemble", assembles)
    assert cache.code_object(LEAN) == good


def test_a_full_disk_leaves_nothing_behind(folder, good, monkeypatch):
    monkeypatch.setattr(cache, "assemble", lambda text: good)  # which writes files as well
    with full_disk(4000):
        assert cache.code_object(LEAN) == good
    assert list(folder.iterdir()) == []


def test_build_replaces_files_or_leaves_them(folder, tmp_path, capsys):
    cache.code_object(LEAN)
    out = tmp_path / "out"
    out.mkdir()
    before = {f"{LEAN}.s": "text of before", f"{LEAN}.hsaco": "code of before"}
    for name, text in before.items():
        (out / name).write_text(text)
    with full_disk(4000):
        assert zyfa(["kernels", "build", LEAN, "--out", str(out)]) == 2
    assert f"--out {str(out)!r}: File too large" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in out.iterdir()} == before
    assert zyfa(["kernels", "build", LEAN, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == set(before)
    umask = os.umask(0)
    os.umask(umask)
    for path in out.iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
