"""AITER's own gfx950 code objects on the emulator: code that nobody here wrote, against fp64.

Emulated figures, Gaussian inputs, one head, seed 0 (ZYFA_AITER_HSA=… pytest tests/gfx950/test_emulator_aiter.py -s):

  relative RMS error           S = 256   512     1024    2048
  v3 bf16                      0.22%     0.22%   0.22%   0.23%
  v3 bf16 causal               0.20%     0.20%   0.20%   0.20%
  v3 fp8                       2.24%     2.38%   2.45%   2.48%
  v3 fp8 causal                1.78%     1.98%   1.98%   1.97%
  v4 fp8 (P as codes)          3.68%     –       4.09%   –
  v4 int8 Q and K, fp8 V       2.86%     –       3.12%   –
"""

from __future__ import annotations

import aiter
import pytest

pytestmark = [pytest.mark.skipif(not aiter.ROOT, reason="ZYFA_AITER_HSA is not set"), pytest.mark.slow]


@pytest.mark.parametrize("seq", [256, 512, 1024, 2048])
@pytest.mark.parametrize(
    ("name", "kind", "causal", "low", "high"),
    [
        ("fwd_hd128_bf16", "bf16", False, 0.0018, 0.0024),
        ("fwd_hd128_bf16_causal", "bf16", True, 0.0017, 0.0022),
        ("fwd_hd128_fp8", "fp8", False, 0.021, 0.027),
        ("fwd_hd128_fp8_causal", "fp8", True, 0.017, 0.021),
    ],
)
def test_v3(name, kind, causal, low, high, seq):
    result = aiter.run(aiter.path(f"fmha_v3_fwd/{name}"), seq, kind=kind, causal=causal)
    print(name, seq, {k: v for k, v in result.items() if k != "hazards"})
    assert low < result["rel_rms"] < high
    assert result["lse_max_abs"] < 1e-5
    assert result["seconds"] < 20 and result["per_second"] > 30_000


@pytest.mark.parametrize("seq", [1, 63, 300])
def test_v3_ragged(seq):
    for name, kind, causal, limit in (
        ("fwd_hd128_bf16", "bf16", False, 0.004),
        ("fwd_hd128_fp8_causal", "fp8", True, 0.03),
    ):
        assert aiter.run(aiter.path(f"fmha_v3_fwd/{name}"), seq, kind=kind, causal=causal)["rel_rms"] < limit


def test_v3_grouped_heads():
    result = aiter.run(
        aiter.path("fmha_v3_fwd/fwd_hd128_fp8_causal"), 512, kind="fp8", causal=True, heads=8, kv_heads=2
    )
    assert 0.017 < result["rel_rms"] < 0.021


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("fwd_hd192_hd128_bf16_causal", {"kind": "bf16", "head_dim": 192, "tile": 128, "block": 256}, 0.0022),
        ("fwd_hd256_fp8_causal", {"kind": "fp8", "head_dim": 256, "v_dim": 256}, 0.021),
    ],
)
def test_v3_other_head_dims(name, options, limit):
    assert aiter.run(aiter.path(f"fmha_v3_fwd/{name}"), 512, causal=True, **options)["rel_rms"] < limit


@pytest.mark.parametrize(
    ("name", "kind", "low", "high"), [("fwd_hd128_fp8", "fp8", 0.03, 0.045), ("fwd_hd128_i8fp8", "i8fp8", 0.025, 0.036)]
)
@pytest.mark.parametrize("seq", [256, 1024])
def test_v4(name, kind, low, high, seq):
    result = aiter.run(aiter.path(f"fmha_v4_fwd/{name}"), seq, kind=kind, causal=False, version=4)
    print(name, seq, {k: v for k, v in result.items() if k != "hazards"})
    assert low < result["rel_rms"] < high


def test_delayed_memory_on_bf16_finds_nothing():
    result = aiter.run(aiter.path("fmha_v3_fwd/fwd_hd128_bf16"), 512, kind="bf16", causal=False, delayed=True)
    assert 0.0018 < result["rel_rms"] < 0.0024


def test_delayed_memory_on_fp8_finds_the_late_waits():
    """Every PV product of the v3 fp8 kernels is issued one wait too early.

    `s_waitcnt lgkmcnt(8)` with only eight transposed reads outstanding waits for none of the four that the MFMA behind
    it takes; the 64 cycles of the MFMA before it hide that. The v4 kernels have lgkmcnt(4) in the same place.
    """
    result = aiter.run(
        aiter.path("fmha_v3_fwd/fwd_hd128_fp8"), 512, kind="fp8", causal=False, delayed=True, collect_hazards=True
    )
    early = [h for h in result["hazards"] if h.kind == "read-before-wait"]
    assert early and all("v_mfma" in h.instruction and "ds_read_b64_tr_b8" in h.message for h in early)
    fixed = aiter.run(
        aiter.path("fmha_v4_fwd/fwd_hd128_fp8"),
        512,
        kind="fp8",
        causal=False,
        version=4,
        delayed=True,
        collect_hazards=True,
    )
    assert not [h for h in fixed["hazards"] if h.kind == "read-before-wait"]
