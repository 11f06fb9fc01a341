"""The kernel parts of a benchmark: Gaussian and captured operands, kernel-only and sustained."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import contenders, timing
from .clocks import Sampler
from .errors import Unavailable
from .shapes import Problem

# A result further from SDPA's than this is another function, not another rounding; fp8's lies below 0.15 even on
# captured activations.
WRONG = 0.3


@dataclass(frozen=True)
class Settings:
    """warmups, launches: of each contender, kernel-only, in `rounds` turns. sustain_s after warm_in_s: sustained."""

    variants: tuple[str, ...]
    peers: tuple[str, ...]
    block_size: int = 16
    warmups: int = 500
    launches: int = 100
    rounds: int = 10
    warm_in_s: float = 1.0
    sustain_s: float = 3.0


@dataclass
class Report:
    """What the parts add to. skipped: contenders that could not run, each with its reason."""

    sampler: Sampler
    note: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)


def calls(problem: Problem, settings: Settings, report: Report) -> tuple[dict[str, contenders.Call], dict[str, float]]:
    """The contenders that run on this problem, with the relative RMS difference of each from SDPA in bf16."""
    makers: dict[str, contenders.Maker] = {
        contenders.zyfa_name(variant, problem): partial(contenders.zyfa, variant) for variant in settings.variants
    }
    makers |= {name: contenders.PEERS[name] for name in settings.peers}
    expected = contenders.tokens_first(contenders.sdpa(problem)(), problem)
    found: dict[str, contenders.Call] = {}
    differences: dict[str, float] = {}
    for name, maker in makers.items():
        try:
            call = maker(problem, settings.block_size)
            out = contenders.tokens_first(call(), problem)
            torch.cuda.synchronize()
        except Unavailable as error:
            _skip(report, name, problem, str(error))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # a peer's own refusal
            _skip(report, name, problem, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        else:
            apart = difference(out, expected)
            if not apart < WRONG:  # a NaN as well
                _skip(report, name, problem, f"its result differs from SDPA's by {apart:.3g}, relative RMS")
                continue
            found[name], differences[name] = call, apart
    return found, differences


def _skip(report: Report, name: str, problem: Problem, reason: str) -> None:
    report.skipped.append({"kernel": name, "shape": str(problem.shape), "reason": reason})


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS difference, by parts so that no fp32 copy of a long sequence is made."""
    gap = total = 0.0
    for a, b in zip(out.split(4096), expected.split(4096), strict=True):
        gap += float((a.float() - b.float()).square().sum())
        total += float(b.float().square().sum())
    return (gap / total) ** 0.5


def kernel_only(part: str, problem: Problem, settings: Settings, report: Report) -> None:
    """Rows of interleaved launches on one problem."""
    import time

    found, differences = calls(problem, settings, report)
    if not found:
        return
    begin = time.time()
    times = timing.interleaved(found, settings.warmups, settings.launches, settings.rounds)
    clocks = report.sampler.between(begin, time.time())
    report.rows += compare(part, problem, times, differences, settings.launches, clocks)


def compare(
    part: str,
    problem: Problem,
    times: dict[str, list[float]],
    differences: dict[str, float],
    launches: int,
    clocks: dict[str, Any] | None,
) -> list[dict[str, Any]]:
    """One row a contender; ratio_to: how many times as fast it is as each other, the median of the rounds' ratios."""
    rows = []
    for name, mine in times.items():
        us = statistics.median(mine)
        rows.append(
            {
                "part": part,
                "kernel": name,
                "shape": str(problem.shape),
                "tflops": problem.shape.flops / us * 1e-6,
                "us": us,
                "us_min": min(mine),
                "us_max": max(mine),
                "us_rounds": mine,
                "launches": launches,
                "ratio_to": {other: ratio(mine, theirs) for other, theirs in times.items() if other != name},
                "difference_from_sdpa": differences[name],
                "clocks": clocks,
            }
        )
    return rows


def ratio(mine: list[float], theirs: list[float]) -> float:
    """How many times as fast: the median over rounds of their time over mine."""
    return statistics.median(b / a for a, b in zip(mine, theirs, strict=True))


def sustained(part: str, problems: list[Problem], settings: Settings, report: Report) -> None:
    """Rows of launches without a pause, the contenders one after another; several problems take turns in each."""
    prepared = [calls(problem, settings, report) for problem in problems]
    names = [name for name in prepared[0][0] if all(name in found for found, _ in prepared)]
    times: dict[str, list[float]] = {}
    more: dict[str, dict[str, Any]] = {}
    for name in names:
        report.note(f"{part}: {name}, {settings.warm_in_s:g} + {settings.sustain_s:g} s")
        each = [found[name] for found, _ in prepared]

        def all_of_them(each: list[contenders.Call] = each) -> None:
            for call in each:
                call()

        us, launches, begin, end = timing.sustained(all_of_them, settings.warm_in_s, settings.sustain_s)
        times[name] = [us / len(each)]
        more[name] = {
            "launches": launches * len(each),
            "seconds": end - begin,
            "clocks": report.sampler.between(begin, end),
        }
    worst = {name: max(differences[name] for _, differences in prepared) for name in names}
    flops = sum(problem.shape.flops for problem in problems) / len(problems)
    label = str(problems[0].shape) if len(problems) == 1 else f"{len(problems)} x {problems[0].shape}"
    for row in compare(part, problems[0], times, worst, 0, None):
        row |= {"shape": label, "tflops": flops / row["us"] * 1e-6, **more[row["kernel"]]}
        report.rows.append(row)
