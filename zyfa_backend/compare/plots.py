"""The report's plots as SVG text without external references."""

from __future__ import annotations

import io
import re

import matplotlib
import numpy as np

from .results import Series
from .variants import BASELINE, NOISE

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

# Okabe and Ito's palette, told apart with every common colour blindness; line styles tell them apart in print.
STYLES = {
    BASELINE: ("#000000", "-"),
    NOISE: ("#8c8c8c", "--"),
    "exact": ("#0072b2", "-"),
    "lean": ("#d55e00", "-"),
    "lean-no-rotation": ("#cc79a7", "-."),
    "int8": ("#009e73", "-"),
}
OTHERS = ("#e69f00", "#56b4e9", "#f0e442", "#5d3a9b")
SMALLEST_BIN = 16
TINY_KL = 1e-7


def style(name: str, names: list[str]) -> tuple[str, str]:
    if name in STYLES:
        return STYLES[name]
    own = [other for other in names if other not in STYLES]
    return OTHERS[own.index(name) % len(OTHERS)], ":"


def kl_by_position(series: dict[str, Series]) -> str:
    figure, axes = _axes("Position in the window (tokens)", "Mean KL from the baseline (nats/token)")
    for name, line in _compared(series):
        assert line.kl is not None
        centres, means = bin_by_position(line.positions, line.kl)
        colour, dash = style(name, list(series))
        axes.plot(centres, np.maximum(means, TINY_KL), dash, color=colour, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yscale("log")
    axes.legend()
    return _svg(figure, "position")


def bin_by_position(positions: np.ndarray, values: np.ndarray, bins: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Geometric means of the bins' positions and means of their values; bins grow with the position.

    Bins with fewer than SMALLEST_BIN tokens are merged with the next.
    """
    edges = np.unique(np.ceil(np.geomspace(1, positions.max() + 1, bins + 1)))
    kept = [edges[0]]
    for edge in edges[1:]:
        if np.count_nonzero((positions >= kept[-1]) & (positions < edge)) >= SMALLEST_BIN:
            kept.append(edge)
    if len(kept) == 1:
        kept.append(edges[-1])
    kept[-1] = edges[-1]
    which = np.digitize(positions, kept) - 1
    counts = np.bincount(which, minlength=len(kept) - 1)
    centres = np.exp(np.bincount(which, weights=np.log(positions)) / counts)
    return centres, np.bincount(which, weights=values) / counts


def kl_distribution(series: dict[str, Series]) -> str:
    figure, axes = _axes("KL of a token (nats)", "Share of tokens with a KL above that")
    for name, line in _compared(series):
        assert line.kl is not None
        ordered = np.sort(np.maximum(line.kl, TINY_KL))
        share = 1 - np.arange(len(ordered)) / len(ordered)
        # A few hundred points draw the same curve as thousands.
        shown = np.unique(len(ordered) - np.ceil(np.geomspace(1, len(ordered), 300)).astype(int))
        colour, dash = style(name, list(series))
        axes.plot(ordered[shown], share[shown], dash, color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=1e-6)
    axes.legend(loc="lower left")
    return _svg(figure, "distribution")


def divergence(series: dict[str, Series]) -> str:
    figure, axes = _axes("Tokens generated", "Share of prompts still identical")
    for name, line in series.items():
        if line.survival is not None:
            colour, dash = style(name, list(series))
            axes.step(np.arange(len(line.survival)), line.survival, dash, where="post", color=colour, label=name)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(left=0)
    axes.legend(loc="upper right")
    return _svg(figure, "divergence")


def ttft(series: dict[str, Series]) -> str:
    names = list(series)
    figure, axes = _axes("Time to first token (s)", "", height=0.8 + 0.42 * len(names))
    for place, name in enumerate(names):
        times = series[name].ttft_s
        colour, _ = style(name, names)
        # Dots side by side where they would hide each other; the offsets have no meaning.
        offsets = np.linspace(-0.22, 0.22, len(times)) if len(times) > 1 else np.zeros(1)
        axes.plot(times, place + offsets, "o", color=colour, alpha=0.45, markersize=4, markeredgewidth=0)
        axes.plot([np.median(times)] * 2, [place - 0.34, place + 0.34], color=colour, linewidth=2.5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    return _svg(figure, "ttft")


def _compared(series: dict[str, Series]) -> list[tuple[str, Series]]:
    return [(name, line) for name, line in series.items() if line.kl is not None]


def _axes(xlabel: str, ylabel: str, height: float = 4.0) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7.2, height), layout="constrained")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element; ids carry `name`, so that several can stand in one page."""
    buffer = io.StringIO()
    # Text stays text: smaller, searchable, and in the page's font.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="(?=(figure|axes|patch|line2d|text|matplotlib|xtick|ytick|legend))', f'id="{name}-', text)
    return text.replace("<svg ", f'<svg role="img" class="plot" data-plot="{name}" ', 1)
