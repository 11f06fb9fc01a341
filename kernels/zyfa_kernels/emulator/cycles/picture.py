"""The timeline of a modelled main loop as a picture."""

from __future__ import annotations

from pathlib import Path

from .costs import LDS, MFMA, VALU
from .mainloop import Report

_COLOURS = {MFMA: "#2a6f97", VALU: "#e07a1f", LDS: "#6a994e", "wait": "#c9c9c9"}
_NAMES = {MFMA: "matrix pipe", VALU: "vector pipe", LDS: "LDS", "wait": "waiting"}


def draw(report: Report, path: str | Path, cycles: int | None = None) -> None:
    """Write `report`'s timeline to a .png or .svg file: one row a wave and pipe, `cycles` long (about two blocks).

    Raises:
        ValueError: the path ends in neither .png nor .svg.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: the picture is a .png or .svg file")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trace = report.trace
    assert trace is not None, "a report that `model` made has its trace"
    start = report.window[0]
    end = min(report.window[1], start + int(cycles or 2 * report.cycles_per_block))
    waves = range(len(trace.issued))
    lanes = [(w, lane) for w in waves for lane in (MFMA, VALU, LDS, "wait")]
    figure, axes = plt.subplots(figsize=(14, 1.2 + 0.42 * len(lanes)), layout="constrained")
    for row, (wave, lane) in enumerate(lanes):
        if lane == "wait":
            bars = [
                (at, cycles)
                for w, at, cycles, reason in trace.stalls
                if w == wave and reason in ("barrier", "vmcnt", "lgkmcnt")
            ]
        else:
            bars = [(s.start, s.end - s.start) for s in trace.spans if s.wave == wave and s.lane == lane]
        shown = [(at - start, length) for at, length in bars if at + length > start and at < end]
        axes.broken_barh(shown, (row - 0.4, 0.8), facecolors=_COLOURS[lane], linewidth=0)
    for visit in trace.barriers:
        if start <= visit.release < end:
            axes.axvline(visit.release - start, color="black", linewidth=0.6, alpha=0.6)
    axes.set_yticks(range(len(lanes)), [f"wave {4 * w}: {_NAMES[lane]}" for w, lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, end - start)
    axes.set_xlabel("cycles (vertical lines: barriers)")
    axes.set_title(
        f"{report.kernel}, modelled: {report.cycles_per_block:.0f} cycles a block, "
        f"matrix pipe {report.matrix_busy:.0%}, "
        f"vector pipe {report.vector_busy:.0%}, LDS {report.lds_busy:.0%} busy",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
