"""The write part of `zyfa bench`, without a GPU: what the kernels are given."""

from __future__ import annotations

import pytest
import torch

from zyfa_backend.bench import shapes, writes
from zyfa_backend.quantization import count_saturated

SHAPE = shapes.at(shapes.parse("hd64:4/2", False, 2), 256)
PLAIN = {"": ("hadamard", False), "-no-rotation": ("none", False)}
COUNTED = {**PLAIN, "-counted": ("hadamard", True)}


@pytest.mark.parametrize(
    ("what", "function", "kinds"),
    [
        ("q", "rotate_quantize_q", PLAIN),
        ("kv", "rotate_quantize_write", COUNTED),
        ("qkv", "rotate_quantize_qkv", COUNTED),
    ],
)
@pytest.mark.parametrize(("form", "short"), [("fp8_e4m3", "fp8"), ("int8", "int8")])
def test_writes_with_and_without_counting(what, function, kinds, form, short, monkeypatch):
    module = pytest.importorskip("zyfa_kernels.triton.rotate_quantize")
    given = []
    monkeypatch.setattr(module, function, lambda *_, **named: given.append(named))
    sets = [writes._operands(SHAPE, 16, form, seed, "cpu") for seed in range(2)]
    calls = writes._kernels(sets, SHAPE, what, form)
    assert list(calls) == [f"zyfa/rotate-quantize-{what}-{short}{end}" for end in kinds]
    for call, (rotation, counted) in zip(calls.values(), kinds.values(), strict=True):
        given.clear()
        call(), call()
        assert [(named["rotation"], named["qk_format"], "saturated" in named) for named in given] == [
            (rotation, form, counted)
        ] * 2
        if counted:  # each set of operands has counters of its own
            assert {id(named["saturated"]) for named in given} == {id(one["saturated"]) for one in sets}
            assert all(x["saturated"].dtype == torch.int64 and x["saturated"].shape == (2,) for x in given)


@pytest.mark.parametrize("form", ["fp8_e4m3", "int8"])
def test_the_operands_of_writes_do_not_saturate(form):
    one = writes._operands(SHAPE, 16, form, 0, "cpu")
    assert count_saturated(one["k"], one["scale"], form, "hadamard") == 0
    assert count_saturated(one["v"], one["scale"], "fp8_e4m3") == 0
