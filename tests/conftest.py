"""Models that several tests share, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_hd128(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint `zyfa model make smollm2-hd128` writes."""
    pytest.importorskip("transformers")
    from zyfa_backend.models.make import make

    return Path(make("smollm2-hd128", tmp_path_factory.mktemp("smollm2") / "smollm2-hd128")["path"])


def pytest_configure(config: pytest.Config) -> None:
    """Processes of `pytest -n` share out the cores, also for their servers: threads in each other's way spin."""
    worker = getattr(config, "workerinput", None)  # not the environment, which a pytest that a test starts inherits
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores, workers = sorted(os.sched_getaffinity(0)), worker["workercount"]
        place = int(worker["workerid"].removeprefix("gw")) % workers  # one that replaces another has a number beyond
        os.sched_setaffinity(0, cores[place % len(cores) :: workers])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the unit tests in tests/sglang: cpu (default) or cuda")
