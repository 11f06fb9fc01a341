"""`zyfa compare` with real vLLM servers, one of which is killed in the middle."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.serving import counters, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS, WINDOWS, PROMPTS, TOKENS = 2, 4, 16, 32
SETTINGS = ("--tokens=1200", "--context=300", f"--prompts={PROMPTS}", f"--max-tokens={TOKENS}", "--top-k=512")

EAGER = "--server-arg=--enforce-eager"  # compiling takes longer than what is measured here


def command(model: Path, out: Path, *arguments: str) -> list[str]:
    zyfa = [sys.executable, "-m", "zyfa_backend.cli", "compare", str(model), "--out", str(out)]
    return [*zyfa, *SETTINGS, "--server-arg=--max-model-len=1024", EAGER, *arguments]


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_server_killed_in_the_middle_is_reported_and_the_run_goes_on_from_there(checkpoint, tmp_path):
    model, out = checkpoint("tiny-mistral"), tmp_path / "out"
    chosen = "--variants=baseline,baseline2,lean"
    stats = out / "variants/lean/stats"
    with subprocess.Popen(command(model, out, chosen), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if ready := re.match(r"lean: server (\d+) is ready", line):
                break
        assert ready, "".join(said)
        server = int(ready[1])
        # Counters are kept up to date on disk: they show when the server is in the middle of its work.
        deadline = time.monotonic() + 120
        while sum(count["calls"] for count in counters(stats).values()) < 50:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(server, signal.SIGKILL)
        error = "".join(said) + process.stderr.read()
        code = process.wait(timeout=120)
    assert code == 1
    assert "lean: the server was ended by SIGKILL" in error
    assert "--kv-cache-dtype fp8" in error and "ZYFA_CONFIG=lean" in error and "last lines of" in error
    assert "the same command measures only what is missing" in error
    assert not [line for line in error.splitlines() if line.startswith("Traceback")]  # the server's own are indented
    assert members(server) == []  # engine processes of the killed server included
    first = json.loads((out / "results.json").read_text())
    assert [row["name"] for row in first["variants"]] == ["baseline", "baseline2"]

    again = subprocess.run(command(model, out, chosen, "--json"), capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr
    assert "baseline: kept" in again.stderr and "baseline2: kept" in again.stderr and "lean: kept" not in again.stderr
    results = json.loads(again.stdout)
    baseline, noise, lean = results["variants"]
    assert [noise["kl"], baseline["perplexity"]] == [first["variants"][1]["kl"], first["variants"][0]["perplexity"]]

    # What ran, by the counters of the server's processes: a prefill per layer and request, a decode per further token.
    assert baseline["kernel"] == "CPU_ATTN" and baseline["kernels"] == {}
    assert noise["kernels"]["torch/bf16-hd128-causal"]["calls"] >= LAYERS * (WINDOWS + PROMPTS)
    assert lean["kernels"]["torch/fp8-hd128-causal-lean"]["calls"] >= LAYERS * (WINDOWS + PROMPTS)
    assert lean["kernels"]["numba/fp8-hd128-decode-lean"]["tokens"] >= LAYERS * PROMPTS * (TOKENS - 1)
    assert not [name for name in noise["kernels"] if "fp8" in name]

    # The vocabulary has 512 tokens, all of which were listed, so nothing is left for the rest bucket.
    assert all(row["unlisted_mass"] < 1e-3 for row in results["variants"])
    assert 0 < noise["kl"] < lean["kl"]
    assert results["noise_band"]["upper"] == noise["kl_interval"][1]
    assert lean["kl_over_noise"] == pytest.approx(lean["kl"] / noise["kl_interval"][1])
    assert lean["perplexity_ratio"] == pytest.approx(1, abs=0.05)
    assert all(0 < row["ttft_s"] < 60 and 0 <= row["token_agreement"] <= 1 for row in results["variants"])
    html = (out / "report.html").read_text()
    assert "torch/fp8-hd128-causal-lean" in html and html.count("<svg") == 4


def test_a_running_server_compared_with_itself_differs_in_nothing(checkpoint, tmp_path):
    with serve(checkpoint("tiny-qwen3"), tmp_path, "--max-logprobs", "512") as engine:
        urls = [f"--url={name}={engine.url}" for name in ("baseline", "baseline2", "same")]
        asked = command(checkpoint("tiny-qwen3"), tmp_path / "out", "--json", *urls)
        done = subprocess.run(asked, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        cached = engine.metric("vllm:prefix_cache_hits_total")
    results = json.loads(done.stdout)
    assert results["noise_band"]["upper"] == 0
    same = results["variants"][2]
    assert (same["kl"], same["perplexity_ratio"], same["top1_agreement"], same["token_agreement"]) == (0, 1, 1, 1)
    assert same["first_divergence"] == TOKENS and same["kl_over_noise"] is None
    # The server caches prefixes and was asked everything three times: only the salts keep the answers cold.
    assert cached == 0


@pytest.fixture(scope="module")
def rows(checkpoint, tmp_path_factory):
    """SmolLM2, 8K tokens in windows of 2,048: what each variant costs."""
    variants = "--variants=lean,lean-no-rotation,int8"
    asked = [sys.executable, "-m", "zyfa_backend.cli", "compare", str(checkpoint("smollm2-hd128"))]
    asked += ["--out", str(tmp_path_factory.mktemp("compare") / "out"), "--tokens=8192", "--context=2048"]
    asked += ["--prompts=0", variants, EAGER, "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    tokens = results["settings"]["scored_tokens"]
    rows = {row["name"]: {**row, "scored_tokens": tokens} for row in results["variants"]}
    print({name: (row["kl"], row["perplexity"]) for name, row in rows.items()})
    return rows


def test_rotation_and_int8_pay_on_a_real_model(rows):
    assert rows["lean"]["kl"] <= 0.6 * rows["lean-no-rotation"]["kl"]
    assert rows["int8"]["kl"] <= 0.5 * rows["lean"]["kl"]
    assert rows["int8"]["perplexity"] == pytest.approx(rows["baseline"]["perplexity"], rel=0.01)


@pytest.mark.parametrize("name", ["lean", "lean-no-rotation", "int8"])
def test_perplexity_rises_by_what_the_divergence_explains(rows, name):
    """Noise of variance s² on a token's log-probability, blind to the token, has KL s²/2 and costs exp(KL) perplexity.

    Over N tokens the mean of the noise has a standard error of s/√N; four of them hold 99.99% of honest runs.
    """
    kl, tokens = rows[name]["kl"], rows[name]["scored_tokens"]
    log_ratio = math.log(rows[name]["perplexity"] / rows["baseline"]["perplexity"])
    assert abs(log_ratio - kl) <= 4 * math.sqrt(2 * kl / tokens)
