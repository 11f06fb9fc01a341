"""Results of a benchmark as a JSON document, tables and plots."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("zyfa", "torch", "triton", "vllm", "amd-aiter"),
    *("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend"),
)
# What a part's plot shows.
PLOTTED = {"serving": ("ttft_s", "time to first token (s)"), "write": ("tb_s", "TB/s, read and written")}
_Columns = list[tuple[str, Callable[[dict[str, Any]], str]]]


def machine() -> dict[str, Any]:
    """The GPU and the versions that the numbers depend on."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": properties.name,
        "architecture": getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}"),
        "processors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "versions": versions,
    }


def table(rows: list[dict[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, cells) of each part that has rows; ratios are shown to the contender that a part is about."""
    tables = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        columns = _COLUMNS["serving" if part == "serving" else "write" if part == "write" else "kernel"]
        cells = [[show(row) for _, show in columns] for row in mine]
        tables.append((part, [title for title, _ in columns], cells))
    return tables


def _ratios(row: dict[str, Any]) -> str:
    return "  ".join(f"{ratio:.2f} × {other}" for other, ratio in row["ratio_to"].items())


def _clock(row: dict[str, Any]) -> str:
    clocks = row.get("clocks") or {}
    return f"{clocks['sm_mhz']['mean']:.0f}" if "sm_mhz" in clocks else "?"


def _value(key: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: form.format(row[key]) if row.get(key) is not None else ""


_NAMES: _Columns = [("kernel", _value("kernel", "{}")), ("shape", _value("shape", "{}"))]
_SPREAD: _Columns = [
    ("µs", _value("us", "{:.1f}")),
    ("least … most", lambda row: f"{row['us_min']:.1f} … {row['us_max']:.1f}"),
]
_COLUMNS: dict[str, _Columns] = {
    "kernel": [
        *_NAMES,
        ("TFLOP/s", _value("tflops", "{:.0f}")),
        *_SPREAD,
        ("differs from SDPA", _value("difference_from_sdpa", "{:.4f}")),
        ("SM MHz", _clock),
        ("times as fast as", _ratios),
    ],
    "write": [*_NAMES, ("TB/s", _value("tb_s", "{:.2f}")), *_SPREAD, ("SM MHz", _clock), ("times as fast as", _ratios)],
    "serving": [
        *_NAMES,
        ("TTFT s", _value("ttft_s", "{:.4f}")),
        ("÷ baseline", _value("ttft_over_baseline", "{:.3f}")),
        ("prefill tokens/s", _value("prefill_tokens_s", "{:.0f}")),
        ("÷ baseline", _value("prefill_over_baseline", "{:.3f}")),
        ("ran", _value("ran", "{}")),
    ],
}


def plots(rows: list[dict[str, Any]], folder: Path) -> list[str]:
    """Writes one .svg a part with more than one row; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        key, label = PLOTTED.get(part, ("tflops", "TFLOP/s"))
        shapes = list(dict.fromkeys(row["shape"] for row in mine))
        kernels = list(dict.fromkeys(row["kernel"] for row in mine))
        figure, axes = pyplot.subplots(figsize=(max(6.0, 1.3 * len(shapes) + 3), 4.5), layout="constrained")
        width = 0.8 / len(kernels)
        for index, kernel in enumerate(kernels):
            found = {row["shape"]: row for row in mine if row["kernel"] == kernel}
            offset = (index - (len(kernels) - 1) / 2) * width
            places = [at + offset for at, shape in enumerate(shapes) if shape in found]
            heights = [found[shape][key] for shape in shapes if shape in found]
            axes.bar(places, heights, width, label=kernel)
        axes.set_xticks(range(len(shapes)), shapes, rotation=20, ha="right", fontsize=8)
        axes.set_ylabel(label)
        axes.set_title(f"zyfa bench: {part}")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7)
        path = folder / f"{part}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        files.append(str(path))
    return files
