"""What ZYFA does not support is refused by name at start-up, or left to the engine, one log line per layer type."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.engine.serving import ZYFA

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# model -> words its refusal must hold
NAMES = {
    "soft cap": ("soft cap 50.0",),
    "ALiBi": ("ALiBi",),
    "sinks": ("sinks",),
    "head size 80": ("head size 80", "64, 96, 128, 192"),
    "speculation": ("speculative decoding (ngram)",),
    "encoder": ("encoder_only",),
}


def probe(folder, fallback: str) -> tuple[dict, str]:
    env = {
        **os.environ, **ZYFA, "ZYFA_FALLBACK": fallback, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.refusal_probe", str(folder)], env=env, capture_output=True, text=True,
        timeout=500,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(line.removeprefix("RESULT ")), done.stdout + done.stderr


def test_refused_by_name(tmp_path) -> None:
    found, _ = probe(tmp_path, "0")
    assert set(found) == set(NAMES)
    for model, words in NAMES.items():
        assert not found[model]["started"], model
        for word in (*words, "ZYFA_FALLBACK=1"):
            assert word in found[model]["error"], (model, found[model])


def test_left_to_the_engine(tmp_path) -> None:
    found, log = probe(tmp_path, "1")
    for model, words in NAMES.items():
        assert found[model] == {"started": True, "tokens": found[model]["tokens"], "kernels": {}}, (model, found[model])
        lines = [line for line in log.splitlines() if "ZYFA_FALLBACK: the engine's backend serves" in line]
        assert sum(words[0] in line for line in lines) == 1, (model, lines)


CODE = """
import json, torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform as platform
from vllm.v1.attention.selector import AttentionSelectorConfig
found = {}
for field, value in [("attn_type", "encoder_decoder"), ("use_dcp", True), ("use_pcp", True), ("use_mm_prefix", True),
                     ("use_kv_connector", True), ("kv_cache_dtype", "fp8_e5m2"), ("use_non_causal", True),
                     ("use_rswa", True), ("use_per_head_quant_scales", True), ("has_sliding_window", True)]:
    config = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None)
    config = config._replace(**{field: value})
    try:
        found[field] = platform.get_attn_backend_cls(None, attn_selector_config=config)
    except Exception as error:
        found[field] = str(error)
print(json.dumps(found))
"""


def test_layer_properties_that_no_small_model_has() -> None:
    env = {**os.environ, **ZYFA}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("has_sliding_window") == "zyfa_backend.vllm.backend.ZyfaAttentionBackend"
    words = {
        "attn_type": "encoder_decoder", "use_dcp": "DCP", "use_pcp": "PCP", "use_mm_prefix": "multimodal",
        "use_kv_connector": "KV connector", "kv_cache_dtype": "fp8_e5m2", "use_non_causal": "non-causal",
        "use_rswa": "R-SWA", "use_per_head_quant_scales": "per-head quant scales",
    }
    assert set(words) == set(found)
    for field, word in words.items():
        assert word in found[field] and "ZYFA_FALLBACK=1" in found[field], found[field]
