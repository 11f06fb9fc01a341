"""What each kernel consists of, phase by phase: any change of the generated code shows here.

After an intended change run it with ZYFA_UPDATE_SNAPSHOTS=1 in the environment and read the diff.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from zyfa_kernels.asm.instruction import Instruction
from zyfa_kernels.asm.program import Comment
from zyfa_kernels.runtime.registry import kernel, names

FOLDER = Path(__file__).parent / "snapshots"


def snapshot(name: str) -> dict:
    made = kernel(name)
    phases: dict[str, Counter] = {}
    phase = "entry"
    for item in made.program.body:
        if isinstance(item, Comment) and item.title:
            phase = item.lines[0]
        elif isinstance(item, Instruction):
            phases.setdefault(phase, Counter())[item.kind] += 1
    return {
        "sha256": hashlib.sha256(made.text().encode()).hexdigest(),
        "vgprs": made.vgprs,
        "sgprs": made.sgprs,
        "lds_bytes": made.lds_bytes,
        "phases": {title: " ".join(f"{k}={n}" for k, n in sorted(counts.items())) for title, counts in phases.items()},
    }


@pytest.mark.parametrize("name", names())
def test_generated_code_is_the_recorded_one(name):
    path = FOLDER / f"{name}.json"
    now = snapshot(name)
    if os.environ.get("ZYFA_UPDATE_SNAPSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(now, indent=1) + "\n")
    assert now == json.loads(path.read_text())


def test_generation_is_deterministic():
    from zyfa_kernels.asm import fp8_hd128

    variant = fp8_hd128.VARIANTS[0]
    assert fp8_hd128.build(variant).text() == fp8_hd128.build(variant).text()
