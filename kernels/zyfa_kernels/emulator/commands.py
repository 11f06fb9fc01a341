"""What `zyfa kernels check` and `zyfa kernels cycles` print: plain functions that return JSON-ready dicts."""

from __future__ import annotations

from pathlib import Path

from .codeobject import CodeObject


def check_document(source: str | Path | bytes, workgroup: int | None = None) -> dict:
    """Static checks of a code object (path or bytes).

    Keys: violations (dicts with rule, address, instruction, message, kernel, cause), instructions, mfma,
    bank_conflicts, lds_accesses (those with conflicts), advice, notes, resources.

    Raises:
        CodeObjectError, UnknownInstruction: the source is no gfx950 code object that can be decoded.
    """
    from .checks import check

    return check(CodeObject.load(source), workgroup).as_dict()


def cycles_document(source: str | Path | bytes, kernel: str | None = None, picture: str | Path | None = None) -> dict:
    """The cycle model of a code object's main loop; `picture` also writes its timeline (.png or .svg).

    Keys: cycles_per_block, matrix_busy, vector_busy, lds_busy, limiter, predicted_fraction_of_peak, modelled (True),
    barriers, stalls, parameters, and the others of `cycles.Report`.

    Raises:
        CodeObjectError, UnknownInstruction: as above. ValueError: no main loop, or another picture format.
    """
    from .cycles import model

    report = model(CodeObject.load(source), kernel)
    if picture is not None:
        report.picture(picture)
    return report.as_dict()
