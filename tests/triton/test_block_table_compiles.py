"""The lists of blocks and slots compile without a GPU; their values are tested with SGLang's pools."""

from __future__ import annotations

import pytest

from tests.triton.compiling import compile_for, run_script

pytest.importorskip("triton")

# (mapped to another pool, packed)
CASES = ((False, False), (True, False), (False, True), (True, True))


def compile_all() -> None:
    from zyfa_kernels.triton.block_table import TILE, _list_kernel

    for target in ("sm_90", "gfx950", "gfx942"):
        for mapped, packed in CASES:
            constants = dict(BLOCK=1 if packed else 16, MAPPED=mapped, PACKED=packed, TILE=TILE)
            # What a call leaves out is None, which Triton takes for a constant.
            constants |= {} if mapped else {"mapping": None}
            constants |= {} if packed else {"first": None}
            types = dict(slots="*i32", rows="*i64", mapping="*i64", first="*i32", lengths="*i32", out="*i32")
            assert compile_for(target, _list_kernel, constants, types).asm
            print("compiled", target, mapped, packed)


def test_compiles() -> None:
    assert run_script(__file__).count("compiled") == 3 * len(CASES)


if __name__ == "__main__":
    compile_all()
