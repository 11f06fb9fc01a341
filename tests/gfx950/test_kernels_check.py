"""Static checks and the cycle model on our own machine code: clean, free of bank conflicts, and as busy as claimed."""

from __future__ import annotations

import pytest
from zyfa_kernels.emulator import CodeObject
from zyfa_kernels.emulator.checks import check
from zyfa_kernels.emulator.cycles import model
from zyfa_kernels.runtime.cache import code_object
from zyfa_kernels.runtime.registry import kernel, names


@pytest.mark.parametrize("name", names())
def test_no_violation_and_no_bank_conflict(name):
    report = check(CodeObject.load(code_object(name)))
    assert not report.violations, "\n".join(map(str, report.violations))
    assert report.bank_conflicts == 0
    assert report.instructions == len(kernel(name).program.instructions())
    # 18 matrix instructions in each of the four copies of the loop, 8 before and 10 behind it
    assert report.mfma == 4 * 18 + 8 + 10


@pytest.mark.parametrize(
    ("name", "busy"),
    [
        ("fp8-hd128-causal-lean", 0.92),
        ("fp8-hd128-full-lean", 0.92),
        ("fp8-hd128-causal-exact", 0.70),
        ("fp8-hd128-full-exact", 0.70),
    ],
)
def test_modelled_matrix_pipe_is_busy(name, busy):
    """The targets are 0.86 and 0.60; these floors are the modelled values of the variants' table, rounded down."""
    report = model(CodeObject.load(code_object(name)))
    assert report.matrix_busy >= busy
