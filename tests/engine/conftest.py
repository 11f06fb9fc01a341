"""Checkpoints for the engine tests, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="engine tests need vLLM")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    """checkpoint(name): the directory of a checkpoint of `zyfa model make`."""
    from zyfa_backend.models.make import make

    root = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        if name == "smollm2-hd128":
            return request.getfixturevalue("smollm2_hd128")
        path = root / name
        if not path.exists():
            make(name, path)
        return path

    return get
