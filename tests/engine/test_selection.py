"""How ZYFA is chosen, refused and left out: by variable, by flag, with and without multiprocessing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine.serving import FP8, ZYFA, counters, ragged_prompts, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]
MULTIPROCESSING = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
PREFILL = "torch/fp8-hd128-causal-lean"


@pytest.mark.parametrize(
    ("how", "args", "env"),
    [
        ("variable, processes", (), {**ZYFA, **MULTIPROCESSING}),
        ("flag, processes", ("--attention-backend", "ZYFA"), MULTIPROCESSING),
        ("flag, one process", ("--attention-backend", "ZYFA"), {}),
        ("custom, processes", ("--attention-backend", "CUSTOM"), MULTIPROCESSING),
    ],
)
def test_chosen(how: str, args: tuple[str, ...], env: dict[str, str], checkpoint, tmp_path) -> None:
    ids = ragged_prompts(500, (100,))[0]
    with serve(checkpoint("tiny-mistral"), tmp_path, *FP8, *args, env=env) as engine:
        engine.complete(ids, 2)
        log = engine.log
    assert counters(engine.stats)[PREFILL]["tokens"] == 2 * len(ids)
    assert "Unknown vLLM environment variable" not in log
    assert "prefill torch/fp8-hd128-causal-lean" in log


def test_flag_beats_variable(checkpoint, tmp_path) -> None:
    with serve(checkpoint("tiny-mistral"), tmp_path, "--attention-backend", "CPU_ATTN", env=ZYFA) as engine:
        engine.complete([11, 12, 13], 2)
    assert counters(engine.stats) == {}


def test_cache_holds_twice_the_tokens(checkpoint, tmp_path) -> None:
    """What the engine reports for one GiB: FP8 bytes take half of what bf16 takes."""
    sizes = []
    for name, args in (("bf16", ()), ("fp8", FP8)):
        with serve(checkpoint("tiny-mistral"), tmp_path, *args, env=ZYFA, name=name) as engine:
            line = next(line for line in engine.log.splitlines() if "KV cache size:" in line)
            sizes.append(int(line.split("KV cache size:")[1].split("tokens")[0].replace(",", "")))
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"VLLM_ATTENTION_BACKEND": "ZYFFA"}, ("ZYFFA", "ZYFA", "CPU_ATTN")),
        ({**ZYFA, "ZYFA_CONFIG": "leen"}, ("leen", "lean", "exact", "int8")),
        ({**ZYFA, "ZYFA_CONFIG": "lean"}, ("--kv-cache-dtype fp8", "unquantized")),
        ({**ZYFA, "ZYFA_SCALES": "/nowhere.safetensors"}, ("/nowhere.safetensors",)),
    ],
)
def test_wrong_value_names_what_is_accepted(env, expected, checkpoint, tmp_path) -> None:
    import os

    from zyfa_backend.compare.server import server_environment, vllm_executable

    model = str(checkpoint("tiny-mistral"))
    done = subprocess.run(
        [vllm_executable(), "serve", model, "--enforce-eager", "--max-model-len", "512"],
        env=server_environment(model, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env}, os.environ),
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode != 0
    for word in expected:
        assert word in done.stdout + done.stderr


def test_installed_but_not_chosen_changes_nothing() -> None:
    """Registration leaves vLLM's own choice of backend as it is."""
    code = """
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
import torch
from zyfa_backend.vllm import register
register()
from vllm.platforms import current_platform as platform
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
config = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None)
print(platform.get_attn_backend_cls(None, attn_selector_config=config))
print(platform.get_mla_prefill_backend_cls(MLAPrefillSelectorConfig(torch.bfloat16)).get_name())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    own = ["vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend", "CPU_SDPA_MLA"]
    assert done.stdout.split() == own, done.stderr
