"""Times the schedules of the Hopper prefill kernel on this GPU and prints the best as TOML for configs/prefill.toml.

    PYTHONPATH=.:kernels python examples/tune_prefill.py

Each schedule is captured in a CUDA graph at each length; the graphs are replayed in random order. The best is the one
with the smallest geometric mean of its times over the lengths; schedules within 2% of it are named too, since runs
differ by more than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_prefill import DEVICE, Problem, Sensors, measure  # noqa: E402
from zyfa_kernels.triton import prefill as module  # noqa: E402
from zyfa_kernels.triton.targets import Target, target_of  # noqa: E402

CHOICES = {
    "stages": (2, 3, 4),
    "section_bytes": (16 << 20, 32 << 20, 64 << 20),
    "consumer_registers, producer_registers": ((240, 24), (232, 40)),
}
HEAD_DIMS = {64: (32, 32), 128: (32, 32), 192: (16, 16)}


def schedules() -> list[dict[str, int]]:
    found = []
    for stages, section, (consumer, producer) in itertools.product(*CHOICES.values()):
        found.append(
            dict(stages=stages, section_bytes=section, consumer_registers=consumer, producer_registers=producer)
        )
    return found


def best(times: dict[int, list[float]], within: float = 1.02) -> tuple[int, list[int]]:
    """Index of the schedule with the smallest geometric mean of its times, and of those that are nearly as good."""
    mean = {i: math.exp(statistics.fmean(map(math.log, t))) for i, t in times.items()}
    first = min(mean, key=mean.__getitem__)
    return first, [i for i in mean if i != first and mean[i] <= within * mean[first]]


def with_schedule(target: Target, schedule: dict[str, int]) -> Target:
    class Chosen(Target):
        def hopper(self, d: int) -> dict[str, int]:
            return schedule

    return Chosen(**{f.name: getattr(target, f.name) for f in dataclasses.fields(target)})


def returning(value: Any) -> Any:
    return lambda *_: value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    target, sensors = target_of(torch.device(DEVICE, torch.cuda.current_device())), Sensors()
    if target.kernel != "hopper":
        sys.exit(f"nothing to tune: {target.reason}")
    random.seed(0)
    for d, (hq, hkv) in HEAD_DIMS.items():
        times: dict[int, list[float]] = {i: [] for i in range(len(schedules()))}
        for s in arguments.lengths:
            calls: dict[str, Any] = {}
            for i, schedule in enumerate(schedules()):
                module._prepared.clear()
                module.target_of = returning(with_schedule(target, schedule))
                problem = Problem(s, hq, hkv, d, 0 if d == 192 else 16)
                try:
                    problem.zyfa()()
                except Exception as error:  # too little shared memory, say
                    times.pop(i, None)
                    print(f"# {d} {schedule}: {str(error).splitlines()[0]}", file=sys.stderr)
                    continue
                prepared = list(module._prepared.values())[-1]
                tensors = prepared_tensors(problem)
                calls[str(i)] = lambda prepared=prepared, tensors=tensors: prepared.run(tensors)
            for name, found in measure(
                calls, max(2, int(0.01 / (problem.flops / 800e12))), arguments.rounds, sensors
            ).items():
                times[int(name)].append(statistics.median(x["ms"] for x in found))
        first, near = best(times)
        for i in near:
            print(f"# within 2%: {schedules()[i]}")
        print(f"[{target.device}.hopper.{d}]")
        print("\n".join(f"{key} = {value}" for key, value in schedules()[first].items()), flush=True)


def prepared_tensors(problem: Problem) -> tuple[torch.Tensor | None, ...]:
    """What `prefill` hands to a prepared call."""
    lengths = problem.keys if problem.block else problem.cu
    scales = (problem.scale, problem.scale, problem.out, None, None)
    return (problem.q, problem.q_scale, problem.k, problem.v, *scales, problem.table, problem.cu, lengths)


if __name__ == "__main__":
    main()
