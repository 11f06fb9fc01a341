"""Device time of launches: many contenders in turn, or one alone for seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

EMPTY = 0.3  # share of its launches' time below which a graph can't hold them
AHEAD_CYCLES = 400_000  # about 0.2 ms for each launch, in which the host queues them so that the GPU never waits


def interleaved(
    calls: Mapping[str, Callable[[], object]], warmups: int, launches: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds of device time of a launch of each call: means of `rounds` runs of launches/rounds launches.

    Each call is launched `warmups` times first. Then the rounds go through the calls in turn, beginning with another
    one each time, so that clocks and temperature are alike for all.
    """
    for call in calls.values():
        for _ in range(warmups):
            call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for round_ in range(rounds):
        first = round_ % len(order)
        for name in order[first:] + order[:first]:
            times[name].append(_run(calls[name], max(1, launches // rounds)))
    return times


def _run(call: Callable[[], object], launches: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()  # its data are where the last contender's were
    torch.cuda._sleep(AHEAD_CYCLES * launches)
    begin.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / launches


def sustained(call: Callable[[], object], warm_in_s: float, seconds: float) -> tuple[float, int, float, float]:
    """(microseconds a launch, launches, time of begin, time of end) of launches without a pause for `seconds`.

    The GPU is kept busy for `warm_in_s` before, so that its clocks have settled.
    """
    us = _run(call, 3)
    # Short kernels would wait for the host, which takes some 0.1 ms a launch.
    many = max(1, min(50, int(2000 / us)))
    replay = captured(call, many) if many > 1 else None
    if replay is not None and _run(replay, 2) < EMPTY * us * many:
        replay = None  # the call launched on a stream of its own, which the graph doesn't hold
    once, many = (call, 1) if replay is None else (replay, many)
    chunk = max(1, int(0.05e6 / us / many))
    _keep_busy(once, chunk, warm_in_s)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.time()
    begin.record()
    launches = many * _keep_busy(once, chunk, seconds)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / launches, launches, started, time.time()


def captured(call: Callable[[], object], launches: int) -> Callable[[], object] | None:
    """One call that replays `launches` of them as a graph, without the host's time; None where capture is refused."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(launches):
                call()
    except RuntimeError:  # a peer may allocate or synchronise in ways that no graph can hold
        torch.cuda.synchronize()
        return None
    return graph.replay


def _keep_busy(call: Callable[[], object], chunk: int, seconds: float) -> int:
    """Launches in chunks, two of them queued at any time; returns how many launches."""
    deadline, launches = time.monotonic() + seconds, 0
    before = None
    while time.monotonic() < deadline:
        for _ in range(chunk):
            call()
        launches += chunk
        mark = torch.cuda.Event()
        mark.record()
        if before is not None:
            before.synchronize()
        before = mark
    if before is not None:
        before.synchronize()
    return launches
