"""What `zyfa bench` makes of times: TFLOP/s, ratios, clocks, tables, plots. And the model presets."""

from __future__ import annotations

import json

import pytest

from zyfa_backend.bench import clocks, kernels, presets, report, servers, serving, shapes


def test_flops_of_a_shape_worked_by_hand():
    """FlashAttention's count: 4 · S² · D · H for both products, half of it under a causal mask."""
    full = shapes.at(shapes.parse("hd128:32/8", False, 2), 1024)
    assert full.flops == 2 * 4 * 1024**2 * 128 * 32
    causal = shapes.at(shapes.parse("hd128:32/8", True, 2), 1024)
    assert causal.flops == full.flops / 2
    mla = shapes.at(shapes.parse("mla", True, 1), 4096)
    assert mla.flops == (192 + 128) * 4096**2 * 16
    assert str(mla) == "mla 16/16 1x4096 causal"


def test_a_model_preset_is_a_shape():
    assert str(shapes.at(shapes.parse("qwen3-8b", True, 1), 8)) == "qwen3-8b hd128 32/8 1x8 causal"
    assert shapes.parse("deepseek-v2-lite", True, 1).qk_dim == 192


class Operands:
    def __init__(self, shape):
        self.shape = shape


def rows():
    problem = Operands(shapes.at(shapes.parse("hd128:32/32", True, 1), 4096))
    times = {"ours": [100.0, 110.0, 90.0], "theirs": [150.0, 132.0, 135.0]}
    return kernels.compare("kernel", problem, times, {"ours": 0.04, "theirs": 0.05}, 30, None)


def test_rates_and_ratios():
    ours, theirs = rows()
    # 4 · 4096² · 128 · 32 / 2 = 137.4 GFLOP in 100 µs are 1374 TFLOP/s.
    assert ours["tflops"] == pytest.approx(1374.4, abs=0.1) and ours["us"] == 100
    # Rounds are paired: 150/100, 132/110, 135/90, whose median is 1.5, not 135/100.
    assert ours["ratio_to"] == {"theirs": 1.5}
    assert theirs["ratio_to"]["ours"] == pytest.approx(2 / 3)
    assert (ours["us_min"], ours["us_max"], ours["launches"]) == (90, 110, 30)
    json.dumps(rows(), allow_nan=False)


def test_table_and_plots(tmp_path):
    served = {
        "baseline": {2048: servers.Timed(2048, [0.2, 0.3, 0.1], [9000.0])},
        "lean": {2048: servers.Timed(2048, [0.1, 0.1, 0.12], [18000.0])},
    }
    facts = {name: {"ran": f"{name}'s kernel", "command": "vllm", "clocks": None} for name in served}
    both = rows() + serving.rows("mistral-7b-v0.3", served, facts)
    (kernel_title, kernel_columns, kernel_cells), (title, columns, cells) = report.table(both)
    assert (kernel_title, title) == ("kernel", "serving")
    assert dict(zip(kernel_columns, kernel_cells[0], strict=True))["times as fast as"] == "1.50 × theirs"
    assert dict(zip(kernel_columns, kernel_cells[0], strict=True))["TFLOP/s"] == "1374"
    assert cells[1] == ["lean", "mistral-7b-v0.3 prompt 2048", "0.1000", "0.500", "18000", "2.000", "lean's kernel"]
    assert columns.count("÷ baseline") == 2
    assert both[-1]["ratio_to"] == {"baseline": 2.0}
    files = report.plots(both, tmp_path)
    assert [f.rsplit("/", 1)[1] for f in files] == ["kernel.svg", "serving.svg"]
    assert "<svg" in (tmp_path / "kernel.svg").read_text() and (tmp_path / "serving.svg").stat().st_size > 1000


def test_clocks_of_nvidia_smi():
    assert clocks.parse_nvidia("1980, 3201, 612.50, 58\n") == {
        "sm_mhz": 1980,
        "memory_mhz": 3201,
        "power_w": 612.5,
        "temperature_c": 58,
    }
    assert clocks.parse_nvidia("1980, [N/A], [Not Supported], 58") == {"sm_mhz": 1980, "temperature_c": 58}
    assert clocks.parse_nvidia("No devices were found") == {}


def card(sclk, mclk, watts, celsius):
    return {
        "Temperature (Sensor edge) (C)": celsius,
        "sclk clock speed:": f"({sclk}Mhz)",
        "mclk clock speed:": f"({mclk}Mhz)",
        "Current Socket Graphics Package Power (W)": watts,
    }


TWO_CARDS = json.dumps({"card0": card(132, 900, "140.0", "35.0"), "card1": card(2100, 1900, "1012.0", "41.0")})


def test_clocks_of_rocm_smi_are_those_of_the_card_asked_for():
    first = {"sm_mhz": 132, "memory_mhz": 900, "power_w": 140, "temperature_c": 35}
    assert clocks.parse_rocm(TWO_CARDS, "0") == first
    second = {"sm_mhz": 2100, "memory_mhz": 1900, "power_w": 1012, "temperature_c": 41}
    assert clocks.parse_rocm(TWO_CARDS, "1") == second
    for text, index in ((TWO_CARDS, "2"), (TWO_CARDS, "10"), ("[]", "0"), ("ROCm not found", "0")):
        with pytest.raises(ValueError):
            clocks.parse_rocm(text, index)


@pytest.mark.parametrize(
    ("current", "environment", "index"),
    [
        (1, {}, "1"),
        (1, {"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}, "1"),
        (0, {"HIP_VISIBLE_DEVICES": "3"}, "3"),
        (1, {"CUDA_VISIBLE_DEVICES": "5, 2"}, "2"),
        (1, {"HIP_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "5,2"}, "7"),
        (1, {"ROCR_VISIBLE_DEVICES": "4,6"}, "6"),
        (0, {"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "1"}, "6"),
        (0, {"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f8d3e6f7a"}, None),
        (0, {"HIP_VISIBLE_DEVICES": "GPU-4b2c1a9f8d3e6f7a"}, None),
        (0, {"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f8d3e6f7a,3", "HIP_VISIBLE_DEVICES": "1"}, "3"),
        (0, {"HIP_VISIBLE_DEVICES": "-1"}, None),
        (2, {"HIP_VISIBLE_DEVICES": "0,1"}, None),
        (0, {"GPU_DEVICE_ORDINAL": "1"}, None),
    ],
)
def test_the_card_of_a_process_that_sees_some(current, environment, index):
    assert clocks.rocm_index(current, environment) == index


def test_rocm_smi_is_asked_for_one_card(tmp_path, monkeypatch):
    """A machine with both tools; rocm-smi notes its arguments and answers for both cards all the same."""
    for name in ("nvidia-smi", "rocm-smi"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/{name}.asked\necho '{TWO_CARDS}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with clocks.Sampler("1") as sampler:
        assert sampler.tool == "rocm-smi"
    assert sampler.samples[0].values["sm_mhz"] == 2100
    assert (tmp_path / "rocm-smi.asked").read_text().split()[-2:] == ["-d", "1"]
    with clocks.Sampler(None) as sampler:
        assert sampler.tool is None and not sampler.samples
    assert not (tmp_path / "nvidia-smi.asked").exists()


def test_clocks_between_two_times():
    sampler = clocks.Sampler()
    sampler.samples = [clocks.Sample(t, {"sm_mhz": 1000.0 + t}) for t in range(10)]
    assert sampler.between(3, 5) == {"samples": 3, "sm_mhz": {"mean": 1004, "min": 1003, "max": 1005}}
    assert sampler.between(20, 30) is None


def test_sampling_reads_the_tool_that_is_there(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1500, 3201, 300.0, 50'\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with clocks.Sampler("GPU-1") as sampler:
        assert sampler.tool == "nvidia-smi"
        while not sampler.samples:
            assert sampler._thread is not None and sampler._thread.is_alive()
    assert sampler.samples[0].values["sm_mhz"] == 1500


@pytest.mark.parametrize("name", ["mistral-7b-v0.3", "qwen3-8b", "deepseek-v2-lite"])
def test_presets_have_the_published_number_of_parameters(name, tmp_path):
    """transformers builds, on no memory, exactly as many weights as the models' cards say."""
    transformers = pytest.importorskip("transformers")
    import torch

    published = {"mistral-7b-v0.3": 7_248_023_552, "qwen3-8b": 8_190_735_360, "deepseek-v2-lite": 15_706_484_224}
    preset = presets.load(name)
    config = transformers.AutoConfig.from_pretrained(preset.write(tmp_path / name))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) == preset.parameters == published[name]
    assert getattr(config, "sliding_window", None) is None  # transformers' default for Mistral is 4096
    assert preset.attention["q_heads"] == config.num_attention_heads
    assert preset.attention["kv_heads"] == config.num_key_value_heads


def test_prompts_leave_room_for_a_token():
    mistral = presets.load("mistral-7b-v0.3")
    assert serving.lengths(mistral, (2048, 8192, 32768)) == [2048, 8192, 32767]
    assert serving.lengths(presets.load("qwen3-8b"), (2048, 32768)) == [2048, 32768]


def test_a_broken_preset_says_what_is_wrong(tmp_path):
    (tmp_path / "bad.toml").write_text("name = 'bad'\n")
    with pytest.raises(presets.BenchError, match=r"bad\.toml is not a model preset: KeyError: 'config'"):
        presets.read(tmp_path / "bad.toml")
