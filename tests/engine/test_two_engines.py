"""Engines that follow one another in a process share neither choice of backend nor scales."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.engine.serving import SINGLE_PROCESS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CODE = """
import json, os, sys
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
import zyfa_backend

def run(model, backend, **arguments):
    os.environ.pop("VLLM_ATTENTION_BACKEND", None)
    if backend:
        os.environ["VLLM_ATTENTION_BACKEND"] = backend
    zyfa_backend.counters.reset()
    engine = LLM(model, enforce_eager=True, max_model_len=512, **arguments)
    prompt = [{"prompt_token_ids": list(range(20, 220))}]
    engine.generate(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    del engine
    cleanup_dist_env_and_memory()
    return zyfa_backend.counters.snapshot()

one, other = sys.argv[1:]
found = [run(one, ""), run(one, "ZYFA", kv_cache_dtype="fp8"), run(other, "ZYFA", kv_cache_dtype="fp8"),
         run(one, ""), run(one, "CUSTOM"), run(one, "ZYFA", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["1"])]
print("RESULT " + json.dumps(found))
"""


def test_each_engine_has_its_own_backend_and_scales(checkpoint, tmp_path) -> None:
    environment = {
        **os.environ, **SINGLE_PROCESS, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"
    }
    environment.pop("VLLM_ATTENTION_BACKEND", None)
    models = [str(checkpoint("tiny-qwen3")), str(checkpoint("tiny-mistral-odd"))]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *models], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    own, zyfa, other, own_again, custom, mixed = json.loads(line.removeprefix("RESULT "))
    assert own["kernels"] == own_again["kernels"] == {}
    for found in (zyfa, other):
        assert found["kernels"]["torch/fp8-hd128-causal-lean"] == {"calls": 2, "tokens": 400}
        assert found["events"] == {"layers calibrated": 2}
    assert custom["kernels"]["torch/bf16-hd128-causal"]["tokens"] == 400
    # A layer that --kv-cache-dtype-skip-layers excepts keeps the model's dtype, the other is quantised.
    assert mixed["kernels"]["torch/bf16-hd128-causal"]["tokens"] == 200
    assert mixed["kernels"]["torch/fp8-hd128-causal-lean"]["tokens"] == 200
