"""The static checks on AITER's objects: what they find there is understood (zyfa_kernels.emulator.checks says why)."""

from __future__ import annotations

import json
from collections import Counter

import aiter
import pytest
from zyfa_kernels.emulator import CodeObject
from zyfa_kernels.emulator.checks import check
from zyfa_kernels.emulator.commands import check_document, cycles_document

pytestmark = [pytest.mark.skipif(not aiter.ROOT, reason="ZYFA_AITER_HSA is not set"), pytest.mark.slow]

KNOWN = {
    "fmha_v3_fwd/fwd_hd128_bf16": {"undefined-register", "valu-permlane"},
    "fmha_v3_fwd/fwd_hd128_fp8": {"wait"},
    "fmha_v3_fwd/fwd_hd128_fp8_causal": {"wait"},
    "fmha_v3_fwd/fwd_hd256_fp8": {"wait", "mfma-result"},
    "fmha_v4_fwd/fwd_hd128_fp8": set(),
    "fmha_v4_fwd/fwd_hd128_mxfp8": set(),
    "fmha_v4_fwd/fwd_hd128_f8f6": {"valu-mfma"},
    "fmha_v4_fwd/fwd_hd128_i8fp8": {"valu-mfma", "mfma-result"},
}


@pytest.mark.parametrize("name", KNOWN)
def test_findings_are_the_known_ones(name):
    report = check(CodeObject.load(aiter.path(name)), lds_runs=False)
    assert {v.rule for v in report.violations} == KNOWN[name]
    if "wait" in KNOWN[name]:
        late = [v for v in report.violations if v.rule == "wait"]
        assert len(late) == 64 and all("v_mfma" in v.instruction and "ds_read_b64_tr_b8" in v.message for v in late)


def test_no_bank_conflicts_and_one_kind_of_lds_finding_in_v3_fp8():
    report = check(CodeObject.load(aiter.path("fmha_v3_fwd/fwd_hd128_fp8")))
    assert report.bank_conflicts == 0 and sum(a.in_loop for a in report.lds_accesses) > 100
    found = Counter(v.rule for v in report.violations if v.rule.startswith("lds"))
    assert set(found) == {"lds-overwrite"}


def test_documents_are_json():
    path = aiter.path("fmha_v4_fwd/fwd_hd128_fp8")
    document = json.loads(json.dumps(check_document(path)))
    assert {"violations", "instructions", "mfma", "bank_conflicts"} <= set(document)
    document = json.loads(json.dumps(cycles_document(path)))
    wanted = {"cycles_per_block", "matrix_busy", "vector_busy", "limiter", "predicted_fraction_of_peak"}
    assert wanted <= set(document)
    # 8.5 vector cycles a score, from the published reading of its disassembly.
    assert document["vector_cycles_per_score"] == pytest.approx(8.5, abs=0.2)
