"""The serving part over HTTP, against a small server that fails on demand, and against the real engine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import fake_vllm
from zyfa_backend.bench import presets, servers, serving
from zyfa_backend.bench.errors import BenchError
from zyfa_backend.compare.server import ServerError

FAKE = Path(fake_vllm.__file__)
QUICK = servers.Settings(prompts=(64, 128), repeats=3, concurrency=2, startup_timeout_s=60, request_timeout_s=20)
TOGETHER = replace(QUICK, together=True)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's memory, of which the fake servers take nothing: 140 of 160 GiB are free."""
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (140 << 30, 160 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts the fake in vllm's place; returns a preset that its context holds."""
    script = tmp_path / "vllm"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {FAKE} \"$@\"\n")
    script.chmod(0o755)
    monkeypatch.setattr(servers, "vllm_executable", lambda: str(script))
    monkeypatch.setenv("FAKE_STARTS", str(tmp_path / "starts"))
    for name in [name for name in os.environ if name.startswith(("ZYFA_", "VLLM_"))]:
        monkeypatch.delenv(name)
    mistral = presets.load("mistral-7b-v0.3")
    return replace(mistral, config={**mistral.config, "vocab_size": 256, "max_position_embeddings": 400})


def measure(preset, names, define=(), settings=QUICK, logs=None):
    notes, skipped = [], []
    chosen = serving.select(list(names), list(define))
    rows = serving.measure(preset, chosen, settings, notes.append, skipped, None, logs)
    return rows, skipped, notes


def test_rows_of_every_server_and_length(fake, tmp_path):
    rows, skipped, _ = measure(fake, ["lean"], logs=tmp_path / "logs")
    assert [(row["kernel"], row["shape"].split()[-1]) for row in rows] == [
        ("baseline", "64"), ("baseline", "128"), ("lean", "64"), ("lean", "128"),
    ]  # fmt: skip
    for row in rows:
        assert len(row["ttft_s_all"]) == len(row["prefill_tokens_s_all"]) == QUICK.repeats
        assert 0 < row["ttft_s"] < 5 and row["prefill_tokens_s"] > 10 and row["tflops"] is None
    base, lean = rows[0], rows[2]
    assert base["ttft_over_baseline"] == 1 and lean["ttft_over_baseline"] == lean["ttft_s"] / base["ttft_s"]
    assert lean["ratio_to"] == {"baseline": base["ttft_s"] / lean["ttft_s"]}
    assert base["ran"] == "CPU_ATTN" and lean["ran"] == "fake/prefill + fake/decode"
    json.dumps(rows, allow_nan=False)
    assert not skipped and {path.name for path in (tmp_path / "logs").iterdir()} == {
        "mistral-7b-v0.3-baseline.log", "mistral-7b-v0.3-lean.log",
    }  # fmt: skip


def test_what_is_served(fake, tmp_path):
    measure(fake, ["lean"], settings=replace(QUICK, server_rounds=2, args=("--dtype", "bfloat16")))
    starts = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    assert len(starts) == 4  # the servers take turns: baseline, lean, baseline, lean
    assert [start["env"].get("VLLM_ATTENTION_BACKEND") for start in starts] == [None, "ZYFA", None, "ZYFA"]
    line = shlex.join(starts[1]["argv"])
    assert "--load-format dummy --skip-tokenizer-init" in line and "--max-model-len 129" in line
    assert line.endswith("--kv-cache-dtype fp8 --dtype bfloat16")
    assert "--kv-cache-dtype" not in shlex.join(starts[0]["argv"])


def test_a_server_that_fails_is_named_and_the_others_go_on(fake):
    rows, skipped, notes = measure(fake, ["broken", "lean"], ["broken=FAKE_DIE=1"])
    assert {row["kernel"] for row in rows} == {"baseline", "lean"}
    assert [entry["kernel"] for entry in skipped] == ["broken"]
    assert "ValueError: the root of it" in skipped[0]["reason"]


def test_together_the_servers_run_at_once_and_are_asked_in_turn(fake, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_REQUESTS", str(tmp_path / "requests"))
    rows, skipped, _ = measure(fake, ["lean", "int8"], settings=TOGETHER)
    assert not skipped and len(rows) == 6
    assert all(len(row["ttft_s_all"]) == len(row["prefill_tokens_s_all"]) == QUICK.repeats for row in rows)
    asked = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    servers = list(dict.fromkeys(request["pid"] for request in asked))
    assert len(servers) == 3
    # One that warms up and three alone, at the first length; each prompt is the same for all, in another order.
    order = [servers.index(request["pid"]) for request in asked[:12]]
    assert order == [0, 1, 2, 0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert asked[3]["prompt"] == asked[4]["prompt"] == asked[5]["prompt"] != asked[6]["prompt"]
    starts = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    # 90% of the free 140 GiB for three, less 7.248e9 weights of two bytes and 8 GiB; 42 GiB are 0.2625 of 160.
    cache = (42 << 30) - 2 * 7_248_023_552 - (8 << 30)
    arguments = f"--kv-cache-memory-bytes {cache} --gpu-memory-utilization 0.26"
    assert [arguments in shlex.join(start["argv"]) for start in starts] == [True] * 3


def test_together_a_server_that_fails_leaves_the_others(fake, gpu):
    rows, skipped, _ = measure(fake, ["broken", "lean"], ["broken=FAKE_DIE=1"], settings=TOGETHER)
    assert {row["kernel"] for row in rows} == {"baseline", "lean"}
    assert [entry["kernel"] for entry in skipped] == ["broken"]


def test_together_without_the_baseline(fake, gpu, monkeypatch):
    monkeypatch.setenv("FAKE_DIE", "1")
    with pytest.raises(ServerError, match="the root of it"):
        measure(fake, ["lean"], settings=TOGETHER)


@pytest.mark.parametrize("given", [("--gpu-memory-utilization=0.3",), ("--kv-cache-memory-bytes", "2G")])
def test_together_the_users_own_memory_arguments_win(given, gpu):
    assert servers.Share.of(presets.load("mistral-7b-v0.3"), 100, given) is None


def test_together_nobody_is_asked_once_the_baseline_is_gone(fake, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_REQUESTS", str(tmp_path / "requests"))
    monkeypatch.setenv("FAKE_DIE_ONCE", str(tmp_path / "died"))
    with pytest.raises(ServerError, match="the root of it"):
        measure(fake, ["lean"], settings=TOGETHER)
    assert not (tmp_path / "requests").exists()


def test_a_baseline_that_fails_later_leaves_the_rounds_before(fake, monkeypatch):
    serve, served = serving._serve, []

    def once(contenders, *rest):
        served.append(contenders[0].variant.name)
        if len(served) > 2:
            contenders[0].error = ServerError("gone")
        else:
            serve(contenders, *rest)

    monkeypatch.setattr(serving, "_serve", once)
    rows, skipped, _ = measure(fake, ["lean"], settings=replace(QUICK, server_rounds=3))
    assert served == ["baseline", "lean", "baseline"]
    assert {len(row["ttft_s_all"]) for row in rows} == {QUICK.repeats} and len(rows) == 4
    assert [(entry["kernel"], entry["reason"]) for entry in skipped] == [("baseline", "gone")]


@pytest.mark.parametrize("when", ["while they start", "while they answer"])
def test_an_interruption_ends_all_servers_at_once(when, fake, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv(*(("FAKE_START_DELAY", "60") if when == "while they start" else ("FAKE_HANG", "1")))
    starts = tmp_path / "starts"

    def interrupt() -> None:
        while not starts.exists() or len(starts.read_text().splitlines()) < 2:
            time.sleep(0.05)
        time.sleep(0.5 if when == "while they start" else 3)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell has the jobs that it starts in the background ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            measure(fake, ["lean"], settings=replace(TOGETHER, request_timeout_s=100))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - begin < 20
    for line in starts.read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads(line)["pid"], 0)


def test_a_gpu_that_does_not_hold_them_together(fake, gpu):
    with pytest.raises(BenchError, match="140 GiB of free GPU memory do not hold 7 servers of mistral-7b-v0.3 "):
        mine = [f"v{i}" for i in range(3)]
        measure(fake, ["lean", "exact", "int8", *mine], [f"{v}=--block-size 64" for v in mine], settings=TOGETHER)


def test_a_zyfa_server_that_ran_no_zyfa_kernel_is_no_result(fake, monkeypatch):
    monkeypatch.setenv("FAKE_NO_STATS", "1")
    rows, skipped, _ = measure(fake, ["lean"])
    assert {row["kernel"] for row in rows} == {"baseline"}
    assert "ran no ZYFA kernel" in skipped[0]["reason"]


def test_without_the_baseline_there_is_nothing_to_compare(fake, monkeypatch):
    monkeypatch.setenv("FAKE_DIE", "1")
    with pytest.raises(ServerError, match="the root of it"):
        measure(fake, ["lean"])


def test_the_choice_of_servers():
    assert [v.name for v in serving.select([], [])] == ["baseline", "engine-fp8", "lean"]
    assert [v.name for v in serving.select(["int8", "baseline", "int8"], [])] == ["baseline", "int8"]
    assert [v.name for v in serving.select([], ["mine=--block-size 64"])][-1] == "mine"
    with pytest.raises(BenchError, match="leen are not known; choose from baseline, engine-fp8, exact, lean"):
        serving.select(["leen"], [])


@pytest.mark.slow
@pytest.mark.engine
def test_the_real_engine_serves_facts_without_weights_or_tokenizer(monkeypatch):
    """Two layers of Qwen3's kind, with the engine's own attention and with ZYFA."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    qwen = presets.load("qwen3-8b")
    small = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
    }  # fmt: skip
    settings = servers.Settings(prompts=(128, 512), repeats=2, concurrency=2)
    rows, skipped, _ = measure(replace(qwen, config={**qwen.config, **small}), ["lean"], settings=settings)
    assert not skipped and len(rows) == 4
    assert {row["ran"].split("/")[0] for row in rows if row["kernel"] == "lean"} == {"numba"}
    assert all(row["ttft_s"] > 0 and row["prefill_tokens_s"] > 0 for row in rows)
