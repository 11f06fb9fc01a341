"""Calibration, freezing, and the file of scales."""

from __future__ import annotations

import pytest
import torch

from zyfa_backend.config import INT8, LEAN, LEAN_NO_ROTATION, ConfigError
from zyfa_backend.scales import LayerScales, ScaleStore


def test_scale_is_maximum_times_headroom_over_largest_code() -> None:
    k = torch.zeros(5, 2, 64)
    k[3, 0, 7], k[1, 1, 2] = -8.0, 4.0
    scales = LayerScales(2)
    assert scales.calibrate(k, k / 2, LEAN, 2.0)
    torch.testing.assert_close(scales.k, torch.tensor([8.0, 4.0]) * 2 / 448)
    torch.testing.assert_close(scales.v, torch.tensor([4.0, 2.0]) * 2 / 448)
    scales = LayerScales(2)
    scales.calibrate(k, k, INT8, 1.0)
    torch.testing.assert_close(scales.k, torch.tensor([8.0, 4.0]) / 127)
    torch.testing.assert_close(scales.v, torch.tensor([8.0, 4.0]) / 448)


def test_scales_of_tiny_values_are_normal_numbers() -> None:
    """A quotient by a subnormal scale overflows long before the value does."""
    scales = LayerScales(2)
    tiny = torch.full((200, 2, 64), 1e-39)
    assert scales.calibrate(tiny, tiny, LEAN, None)
    assert scales.k.tolist() == scales.v.tolist() == [2.0**-126] * 2


def test_head_without_a_finite_value_waits_for_the_next_prefill() -> None:
    k = torch.ones(4, 2, 64)
    bad = k.clone()
    bad[:, 1] = torch.nan
    scales = LayerScales(2)
    assert not scales.calibrate(bad, k, LEAN, 2.0)
    first = scales.k[0].item()
    assert first == pytest.approx(2 / 448) and scales.k[1] == 1
    assert scales.calibrate(3 * k, 3 * k, LEAN, 2.0)
    assert scales.k[0].item() == first, "a frozen head keeps its scale"
    assert scales.k[1].item() == pytest.approx(6 / 448)
    assert scales.v[0].item() == pytest.approx(2 / 448)


def test_file_round_trip_and_what_it_refuses(tmp_path) -> None:
    path = str(tmp_path / "scales.safetensors")
    store = ScaleStore(LEAN, None, path, None)
    store.layer("layer0", 2)
    store.calibrate("layer0", torch.randn(9, 2, 64), torch.randn(9, 2, 64))
    held = store.layer("layer0", 2)

    again = ScaleStore(LEAN, path, None, None).layer("layer0", 2)
    assert again.frozen and path in again.source
    assert torch.equal(again.k, held.k) and torch.equal(again.v, held.v)

    with pytest.raises(ConfigError, match="layer1.k_scale"):
        ScaleStore(LEAN, path, None, None).layer("layer1", 2)
    with pytest.raises(ConfigError, match="3 KV heads"):
        ScaleStore(LEAN, path, None, None).layer("layer0", 3)
    with pytest.raises(ConfigError, match="rotation='hadamard'.*rotation='none'"):
        ScaleStore(LEAN_NO_ROTATION, path, None, None)
    with pytest.raises(ConfigError, match="qk_format"):
        ScaleStore(INT8, path, None, None)
    (tmp_path / "junk").write_text("nonsense")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        ScaleStore(LEAN, str(tmp_path / "junk"), None, None)


@pytest.mark.parametrize(("tokens", "fp8", "int8"), [(1, 64, 4), (127, 64, 4), (128, 2, 1.25), (2000, 2, 1.25)])
def test_a_short_first_prompt_leaves_more_room(tokens: int, fp8: float, int8: float) -> None:
    x = torch.ones(tokens, 1, 64)
    for config, largest, headroom in ((LEAN, 448, fp8), (INT8, 127, int8)):
        scales = LayerScales(1)
        scales.calibrate(x, x, config, None)
        assert scales.k.item() == pytest.approx(headroom / largest)
        assert scales.v.item() == pytest.approx(fp8 / 448)


def test_room_costs_fp8_nothing() -> None:
    """The error of e4m3 with 64-fold headroom is that with 2-fold: what remains lies above its subnormals."""
    from zyfa_backend.quantization import e4m3_decode, quantize_kv

    torch.manual_seed(0)
    x = torch.randn(500, 1, 128)
    errors = []
    for headroom in (2.0, 64.0):
        scale = x.abs().max().reshape(1) * headroom / 448
        errors.append((e4m3_decode(quantize_kv(x, scale, "fp8_e4m3")) * scale - x).norm() / x.norm())
    assert errors[1] <= 1.02 * errors[0]


def test_checkpoint_scale_for_int8_covers_the_same_range() -> None:
    scales = ScaleStore(INT8).layer("layer0", 1, (0.25, 0.5))
    assert scales.k.item() == pytest.approx(0.25 * 448 / 127) and scales.v.item() == 0.5


def test_an_unwritable_file_does_not_end_the_request(tmp_path, caplog) -> None:
    store = ScaleStore(LEAN, save=str(tmp_path / "gone" / "scales"))
    store.layer("layer0", 1)
    store.calibrate("layer0", torch.ones(200, 1, 64), torch.ones(200, 1, 64))
    assert store.layer("layer0", 1).frozen and "could not be written" in caplog.text


def test_foreign_metadata_is_refused_by_name(tmp_path) -> None:
    from safetensors.torch import save_file

    for number, text in enumerate(("{", "[1]")):
        path = tmp_path / str(number)
        save_file({"x": torch.ones(1)}, path, metadata={"zyfa": text})
        with pytest.raises(ConfigError, match="not a safetensors file of scales"):
            ScaleStore(LEAN, str(path))


def test_checkpoint_scales_win_over_calibration() -> None:
    scales = ScaleStore(LEAN, None, None, None).layer("layer0", 3, (0.25, 0.5))
    assert scales.frozen and scales.source == "checkpoint"
    assert scales.k.tolist() == [0.25] * 3 and scales.v.tolist() == [0.5] * 3
