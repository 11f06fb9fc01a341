"""K and V scales inside a server: the checkpoint's, calibrated ones, and values that saturate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.serving import FP8, ZYFA, ragged_prompts, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def with_scales(source: Path, target: Path, k: list[float], v: float) -> Path:
    """A copy of a two-layer checkpoint that brings per-tensor FP8 scales, as llm-compressor writes them."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed", "ignore": [],
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }
    (target / "config.json").write_text(json.dumps(config))
    weights = load_file(target / "model.safetensors")
    for layer, scale in enumerate(k):
        weights[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([scale])
        weights[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([v])
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def events(folder: Path) -> dict[str, int]:
    (path,) = folder.glob("stats-*.json")
    return json.loads(path.read_text())["events"]


def test_checkpoint_scales_are_used(checkpoint, tmp_path) -> None:
    """q, k and v scales all different, and different in each layer."""
    model = with_scales(checkpoint("tiny-qwen3"), tmp_path / "model", [0.021, 0.031], 0.011)
    ids = ragged_prompts(500, (300,))[0]
    answers = []
    for name, path in (("scaled", model), ("plain", checkpoint("tiny-qwen3"))):
        with serve(path, tmp_path, *FP8, env=ZYFA, name=name) as engine:
            answers.append(engine.complete(ids, 4, prompt_logprobs=True).prompt_logprobs)
            log = engine.log
        if name == "scaled":
            assert "layers.0.self_attn.attn from checkpoint: k 0.021 to 0.021, v 0.011 to 0.011" in log
            assert "layers.1.self_attn.attn from checkpoint: k 0.031 to 0.031, v 0.011 to 0.011" in log
            assert "layers calibrated" not in events(engine.stats)
        else:
            assert events(engine.stats)["layers calibrated"] == 2
    differ = [abs(a - b) for a, b in zip(*answers, strict=True)]
    assert 0 < sum(differ) / len(differ) < 0.05


def test_saturation_is_counted_and_reported(checkpoint, tmp_path) -> None:
    """With a V scale of 1e-5 the largest value that the cache holds is 0.0045: nearly every V is cut off."""
    model = with_scales(checkpoint("tiny-qwen3"), tmp_path / "model", [0.02, 0.02], 1e-5)
    with serve(model, tmp_path, *FP8, env=ZYFA) as engine:
        engine.complete(ragged_prompts(500, (100,))[0], 1)
        log = engine.log
    values = 2 * 100 * 2 * 128
    assert 0.8 * values < events(engine.stats)["saturated values"] <= values
    assert "saturated" in log and "ZYFA_HEADROOM" in log
