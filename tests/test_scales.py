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
    assert scales.calibrate(k, k / 2, LEAN, None)
    torch.testing.assert_close(scales.k, torch.tensor([8.0, 4.0]) * 2 / 448)
    torch.testing.assert_close(scales.v, torch.tensor([4.0, 2.0]) * 2 / 448)
    scales = LayerScales(2)
    scales.calibrate(k, k, INT8, 1.0)
    torch.testing.assert_close(scales.k, torch.tensor([8.0, 4.0]) / 127)
    torch.testing.assert_close(scales.v, torch.tensor([8.0, 4.0]) / 448)


def test_head_without_a_finite_value_waits_for_the_next_prefill() -> None:
    k = torch.ones(4, 2, 64)
    bad = k.clone()
    bad[:, 1] = torch.nan
    scales = LayerScales(2)
    assert not scales.calibrate(bad, k, LEAN, None)
    first = scales.k[0].item()
    assert first == pytest.approx(2 / 448) and scales.k[1] == 1
    assert scales.calibrate(3 * k, 3 * k, LEAN, None)
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


def test_checkpoint_scales_win_over_calibration() -> None:
    scales = ScaleStore(LEAN, None, None, None).layer("layer0", 3, (0.25, 0.5))
    assert scales.frozen and scales.source == "checkpoint"
    assert scales.k.tolist() == [0.25] * 3 and scales.v.tolist() == [0.5] * 3
