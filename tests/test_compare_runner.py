"""compare's run over HTTP against a small server that fails on demand; the real engine is in test_compare_engine.py."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import fake_vllm
from zyfa_backend import cli
from zyfa_backend.compare import engines, server, state
from zyfa_backend.compare.variants import KNOWN, UNQUANTISED, VariantError, second_baseline, select

FAKE = Path(fake_vllm.__file__)
NOISY = "noisy=FAKE_NOISE=0.5"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Runs `zyfa compare` with the fake in place of vllm; returns a function of the extra arguments."""
    script = tmp_path / "vllm"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {FAKE} \"$@\"\n")
    script.chmod(0o755)
    monkeypatch.setattr(engines, "vllm_executable", lambda: str(script))
    monkeypatch.setenv("FAKE_STARTS", str(tmp_path / "starts"))
    for name in list(os.environ):
        if name.startswith(("ZYFA_", "VLLM_")):
            monkeypatch.delenv(name)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def compare(*arguments: str) -> int:
        handler = signal.getsignal(signal.SIGTERM)
        try:
            return cli.run(
                ["compare", str(model), "--out", str(tmp_path / "out"), "--tokens=600", "--context=200", "--top-k=257"]
                + ["--prompts=4", "--prompt-tokens=50", "--max-tokens=8", *arguments]
            )
        finally:
            signal.signal(signal.SIGTERM, handler)

    return compare


def starts(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]


def test_numbers_are_those_of_the_servers_distributions(fake, tmp_path, capsys):
    assert fake("--json", f"--define={NOISY}", "--variants=noisy") == 0
    output = capsys.readouterr().out
    results = json.loads(output)  # one document and nothing else
    assert results == json.loads((tmp_path / "out/results.json").read_text())
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert [len(window) for window in plan["windows"]] == [200, 200, 200]
    clean, noisy = ({t: fake_vllm.distribution(t, noise) for t in range(256)} for noise in (0.0, 0.5))
    kl, surprise, same = [], [], []
    for window in plan["windows"]:
        for before, after in zip(window, window[1:], strict=False):
            p, q = np.array(clean[before]), np.array(noisy[before])
            kl.append((np.exp(p) * (p - q)).sum())
            surprise.append(-q[after])
            same.append(p.argmax() == q.argmax())
    baseline, row = results["variants"]
    assert (baseline["name"], row["name"]) == ("baseline", "noisy")
    assert row["kl"] == pytest.approx(np.mean(kl), rel=1e-4)
    assert row["kl_interval"][0] < row["kl"] < row["kl_interval"][1]
    assert row["perplexity"] == pytest.approx(np.exp(np.mean(surprise)), rel=1e-4)
    assert row["top1_agreement"] == pytest.approx(np.mean(same))
    assert row["perplexity_ratio"] == pytest.approx(row["perplexity"] / baseline["perplexity"], rel=1e-6)
    # Greedy continuations follow the tables, too.
    agreements, divergences = [], []
    for prompt in plan["prompts"]:
        lines = []
        for tables in (clean, noisy):
            token, line = prompt[-1], []
            for _ in range(8):
                token = int(np.argmax(tables.get(token) or fake_vllm.distribution(token, 0.5 * (tables is noisy))))
                line.append(token)
            lines.append(line)
        equal = [a == b for a, b in zip(*lines, strict=True)]
        agreements.append(np.mean(equal))
        divergences.append(equal.index(False) if False in equal else 8)
    assert row["token_agreement"] == pytest.approx(np.mean(agreements))
    assert row["first_divergence"] == pytest.approx(np.mean(divergences))
    assert 0 < row["ttft_s"] < 5
    assert results["noise_band"] is None and row["kl_over_noise"] is None


def test_a_noise_band_of_the_baselines_own_backend_is_none(fake, capsys, monkeypatch):
    import dataclasses

    from zyfa_backend.compare.variants import Variant

    def again(*_):
        return Variant("baseline2", {}, ("--attention-backend", "OTHER"), what="another")

    engine = dataclasses.replace(engines.ENGINES["vllm"], second_baseline=again)
    monkeypatch.setitem(engines.ENGINES, "vllm", engine)
    assert fake("--json", f"--define={NOISY}", "--variants=baseline2,noisy") != 0
    results = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in results["variants"]] == ["baseline", "noisy"] and results["noise_band"] is None
    (failure,) = results["failures"]
    assert failure["name"] == "baseline2" and "CPU_ATTN served it as it served the baseline" in failure["error"]


def test_noise_band_and_kernels_from_the_counters(fake, capsys):
    defines = ("--define=baseline2=FAKE_NOISE=0.1", "--define=zyfa=VLLM_ATTENTION_BACKEND=ZYFA FAKE_NOISE=0.5")
    assert fake("--json", *defines, "--variants=baseline2,zyfa") == 0
    results = json.loads(capsys.readouterr().out)
    _, noise, zyfa = results["variants"]
    assert results["noise_band"]["upper"] == noise["kl_interval"][1]
    assert zyfa["kl_over_noise"] == pytest.approx(zyfa["kl"] / noise["kl_interval"][1])
    assert zyfa["kernel"] == "fake/prefill + fake/decode"
    assert zyfa["kernels"]["fake/prefill"] == {"calls": 42, "tokens": 200}  # both processes together
    assert noise["kernel"] == "CPU_ATTN"


def test_without_prompts_the_text_alone_is_compared(fake, tmp_path, capsys):
    assert fake("--json", "--prompts=0", f"--define={NOISY}", "--variants=noisy") == 0
    row = json.loads(capsys.readouterr().out)["variants"][1]
    assert row["kl"] > 0.01
    assert row["token_agreement"] is row["first_divergence"] is row["ttft_s"] is None
    assert fake("--prompts=0", f"--define={NOISY}", "--variants=noisy") == 0  # and can be kept
    assert len(starts(tmp_path)) == 2


def test_bos_begins_every_window_and_prompt(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_BOS", "1")
    assert fake("--json", "--variants=baseline") == 0
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert all(part[0] == fake_vllm.BOS for part in plan["windows"] + plan["prompts"])
    assert len(plan["prompts"][0]) == 50


def test_a_server_that_dies_shows_its_log_and_the_same_command_resumes(fake, tmp_path, capsys):
    define = f"--define=frail=FAKE_NOISE=0.3 FAKE_DIE_ONCE={tmp_path / 'died'}"
    arguments = (define, f"--define={NOISY}", "--variants=frail,noisy")
    assert fake(*arguments) == 1
    error = capsys.readouterr().err
    assert "frail: the server ended with exit code 7" in error
    assert "first error in its log: ValueError: the root of it" in error
    assert "last words" in error and "vllm serve" in error and "FAKE_NOISE=0.3" in error
    assert "Traceback" not in error
    assert [start["noise"] for start in starts(tmp_path)] == [0.0, 0.3, 0.5]  # the others still ran
    first = json.loads((tmp_path / "out/results.json").read_text())
    assert [row["name"] for row in first["variants"]] == ["baseline", "noisy"]
    assert [failure["name"] for failure in first["failures"]] == ["frail"]

    assert fake(*arguments) == 0
    assert [start["noise"] for start in starts(tmp_path)] == [0.0, 0.3, 0.5, 0.3]  # only what was missing
    second = json.loads((tmp_path / "out/results.json").read_text())
    assert [row["name"] for row in second["variants"]] == ["baseline", "frail", "noisy"]
    assert second["variants"][2]["kl"] == first["variants"][1]["kl"]

    assert fake("--fresh", *arguments) == 0
    assert len(starts(tmp_path)) == 7


@pytest.mark.parametrize("changed", ["--max-tokens=9", "--seed=1", "--context=150", "--server-arg=--dtype=float32"])
def test_a_changed_setting_is_measured_anew(fake, tmp_path, changed):
    assert fake("--variants=baseline") == 0
    assert fake("--variants=baseline", changed) == 0
    assert len(starts(tmp_path)) == 2


def test_a_changed_environment_model_or_version_is_measured_anew(fake, tmp_path, monkeypatch):
    assert fake("--variants=baseline") == 0
    monkeypatch.setenv("VLLM_SOMETHING", "1")
    assert fake("--variants=baseline") == 0
    (tmp_path / "model/config.json").write_text('{"other": 1}')
    assert fake("--variants=baseline") == 0
    monkeypatch.setattr(state, "versions", lambda: {"vllm": "0.33.0"})
    assert fake("--variants=baseline") == 0
    assert len(starts(tmp_path)) == 4
    assert fake("--variants=baseline") == 0
    assert len(starts(tmp_path)) == 4


def test_an_edited_zyfa_is_measured_anew_but_not_the_baseline(fake, tmp_path, monkeypatch):
    arguments = ("--define=zyfa=VLLM_ATTENTION_BACKEND=ZYFA", "--variants=zyfa")
    assert fake(*arguments) == 0
    monkeypatch.setattr(state, "own_source", lambda: "edited")
    assert fake(*arguments) == 0
    assert len(starts(tmp_path)) == 3


def test_a_baseline_that_dies_ends_the_run(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_DIE", "1")
    assert fake(f"--define={NOISY}") == 1
    assert "ended with exit code 7" in capsys.readouterr().err
    assert len(starts(tmp_path)) == 1


def test_a_hanging_server_times_out_with_its_log(fake, capsys):
    assert fake("--define=stuck=FAKE_HANG=1", "--variants=stuck", "--request-timeout=2") == 1
    error = capsys.readouterr().err
    assert "did not answer POST /v1/completions within 2 s" in error and "| hanging" in error


def test_a_server_that_never_gets_healthy(fake, capsys):
    assert fake("--define=slow=FAKE_START_DELAY=60", "--variants=slow", "--startup-timeout=2") == 1
    assert "was not healthy after 2 s" in capsys.readouterr().err


def test_a_taken_port_is_named_before_anything_starts(fake, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert fake("--variants=baseline", f"--port={port}") == 1
    assert f"port {port} is taken" in capsys.readouterr().err
    assert not (tmp_path / "starts").exists()


def test_a_log_probability_that_is_not_a_number_is_an_error(fake, capsys):
    assert fake("--define=broken=FAKE_NAN=1", "--variants=broken") == 1
    assert "not a number at position 5" in capsys.readouterr().err


def test_a_zyfa_variant_that_ran_no_kernel_is_an_error(fake, capsys):
    assert fake("--define=ghost=VLLM_ATTENTION_BACKEND=ZYFA FAKE_NO_STATS=1", "--variants=ghost") == 1
    assert "ran no ZYFA kernel" in capsys.readouterr().err


def test_the_baseline_sees_none_of_zyfas_switches(fake, tmp_path, monkeypatch):
    for name, value in (("VLLM_ATTENTION_BACKEND", "ZYFA"), ("ZYFA_CONFIG", "exact"), ("VLLM_CPU_KVCACHE_SPACE", "3")):
        monkeypatch.setenv(name, value)
    assert fake("--variants=lean") == 0
    baseline, lean = starts(tmp_path)
    assert not [name for name in baseline["env"] if name.startswith("ZYFA") or name == "VLLM_ATTENTION_BACKEND"]
    assert baseline["env"]["VLLM_CPU_KVCACHE_SPACE"] == "3" and baseline["env"]["HF_HUB_OFFLINE"] == "1"
    assert lean["env"]["ZYFA_CONFIG"] == "lean" and lean["env"]["VLLM_ATTENTION_BACKEND"] == "ZYFA"
    assert lean["argv"][-2:] == ["--kv-cache-dtype", "fp8"]
    assert "--no-enable-prefix-caching" in baseline["argv"] and "--kv-cache-dtype" not in baseline["argv"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--context=400",), "--context 400 is too long; at most 399: of 400 that the server takes"),
        (("--tokens=500000",), "--tokens 500000 is more than the text has"),
        (("--prompt-tokens=395",), "--prompt-tokens 395 and --max-tokens 8 are together more than the 400"),
    ],
)
def test_more_than_the_model_or_the_text_has(fake, capsys, arguments, said):
    assert fake("--variants=baseline", *arguments) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_running_servers_are_compared_by_url(fake, tmp_path, capsys):
    ports = [server.free_port(), server.free_port()]
    running = [
        subprocess.Popen(
            [sys.executable, FAKE, "serve", "x", "--port", str(port)], env={**os.environ, "FAKE_NOISE": noise}
        )
        for port, noise in zip(ports, ("0", "0.5"), strict=True)
    ]
    urls = [f"--url={name}=http://127.0.0.1:{port}/v1" for name, port in zip(("baseline", "other"), ports, strict=True)]
    try:
        deadline = time.monotonic() + 20
        while fake("--json", *urls) != 0:
            assert "no server answers" in capsys.readouterr().err and time.monotonic() < deadline
            time.sleep(0.3)
        results = json.loads(capsys.readouterr().out)
        assert [row["name"] for row in results["variants"]] == ["baseline", "other"]
        assert results["variants"][1]["kl"] > 0.01
        assert all(process.poll() is None for process in running)  # not ours to end
    finally:
        for process in running:
            process.kill()
            process.wait()


def start_compare(fake_vllm_script: Path, tmp_path: Path) -> tuple[subprocess.Popen, int, int]:
    """`zyfa compare` in a process of its own with a server that hangs; returns it, the server's pid and its child's."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    code = (
        "import sys; from zyfa_backend import cli; from zyfa_backend.compare import engines; "
        f"engines.vllm_executable = lambda: {str(fake_vllm_script)!r}; sys.exit(cli.run(sys.argv[1:]))"
    )
    arguments = ["compare", str(tmp_path / "m"), "--out", str(tmp_path / "o"), "--context=200", "--tokens=600"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--variants=baseline"],
        env={**os.environ, "FAKE_HANG": "1", "FAKE_CHILD": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "o/variants/baseline/server.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "hanging" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    child = int(re.search(r"child (\d+)", log.read_text())[1])
    return process, os.getpgid(child), child


def gone(pid: int, within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_servers_whole_process_group(fake, tmp_path, how):
    process, leader, child = start_compare(tmp_path / "vllm", tmp_path)
    process.send_signal(how)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command goes on from there" in error and "Traceback" not in error
    assert gone(leader) and gone(child)


def test_a_second_run_in_the_same_directory_is_refused(fake, tmp_path, capsys):
    process, leader, child = start_compare(tmp_path / "vllm", tmp_path)
    try:
        assert fake("--variants=baseline", "--out", str(tmp_path / "o")) == 1
        assert "another zyfa compare is at work" in capsys.readouterr().err
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_zyfa_leaves_no_server_behind(fake, tmp_path):
    process, leader, child = start_compare(tmp_path / "vllm", tmp_path)
    try:
        process.kill()
        process.communicate(timeout=30)
        assert gone(leader)
    finally:
        os.kill(child, signal.SIGKILL)  # the real API server ends its children itself


def test_variants_are_chosen_by_name_definition_and_url():
    names = [variant.name for variant in select([], [], [])]
    assert names == ["baseline", "baseline2", "exact", "lean", "lean-no-rotation", "int8"]
    assert [v.name for v in select(["lean"], [], [])] == ["baseline", "lean"]
    chosen = select([], ["own=ZYFA_CONFIG='lean,tile=128' --kv-cache-dtype fp8"], [])[-1]
    assert (chosen.name, chosen.env) == ("own", {"ZYFA_CONFIG": "lean,tile=128"})
    assert chosen.args == ("--kv-cache-dtype", "fp8")
    assert chosen.uses_zyfa and not KNOWN["baseline"].uses_zyfa
    assert [v.name for v in select([], [], ["baseline=http://h:1", "mine=http://h:2"])] == ["baseline", "mine"]


@pytest.mark.parametrize(
    ("names", "defined", "urls", "said"),
    [
        (["leen"], [], [], "unknown variant leen; known are baseline, baseline2, exact, lean"),
        ([], ["x"], [], "'x' is not accepted"),
        ([], ["../x=A=1"], [], "'../x=A=1' is not accepted"),
        ([], ["x=word"], [], "'word' is neither VARIABLE=VALUE nor a --flag"),
        ([], ["x=A='1"], [], "No closing quotation"),
        ([], [], ["x=localhost:8000"], "begins with http://"),
    ],
)
def test_badly_written_variants(names, defined, urls, said):
    with pytest.raises(VariantError, match=re.escape(said)):
        select(names, defined, urls)


def test_the_noise_band_is_another_backend_than_the_baselines():
    assert second_baseline("cpu", "CPU_ATTN") is UNQUANTISED
    assert second_baseline("cuda", "FLASH_ATTN").args == ("--attention-backend", "TRITON_ATTN")
    assert second_baseline("cuda", "TRITON_ATTN").args == ("--attention-backend", "FLASH_ATTN")
    assert second_baseline("rocm", "ROCM_AITER_FA").args == ("--attention-backend", "TRITON_ATTN")
    assert second_baseline("rocm", "ROCM_AITER_MLA").args == ("--attention-backend", "TRITON_MLA")
    assert second_baseline("cuda", "TRITON_MLA") is UNQUANTISED


def test_the_backend_is_read_from_vllms_own_words():
    # Lines of vLLM 0.32 (platforms/cuda.py, rocm.py, cpu.py).
    cuda = "INFO 12-01 10:00:00 [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['X']."
    rocm = "INFO 12-01 10:00:00 [rocm.py:850] Using ROCM_AITER_FA backend out of potential backends: ['ROCM_AITER_FA']."
    chosen = "INFO 12-01 10:00:00 [cuda.py:446] Using AttentionBackendEnum.TRITON_ATTN backend."
    mla = "INFO [cpu.py:175] Using CPU_MLA backend.\nINFO [cpu_worker.py:260] Explicitly set"
    assert (server.attention_backend(cuda), server.platform_of(cuda)) == ("FLASH_ATTN", "cuda")
    assert (server.attention_backend(rocm), server.platform_of(rocm)) == ("ROCM_AITER_FA", "rocm")
    assert server.attention_backend(chosen) == "TRITON_ATTN"
    assert (server.attention_backend(mla), server.platform_of(mla)) == ("CPU_MLA", "cpu")
    assert server.attention_backend("[cpu_worker.py:260] Explicitly set") == "CPU_ATTN"
    assert server.attention_backend("nothing") == "unknown"
