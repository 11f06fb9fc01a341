"""The emulator: launches kernels of a code object on emulated memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .codeobject import CodeObject
from .errors import CodeObjectError, EmulatorError
from .lds import LDS_BYTES
from .memory import GlobalMemory
from .program import Program, compile_program
from .scheduler import Launch
from .state import LANES


@dataclass
class Stats:
    """What the launches of an emulator executed: wave-instructions in all and by mnemonic, and host seconds."""

    instructions: int = 0
    by_mnemonic: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.instructions / self.seconds if self.seconds else 0.0


class Emulator:
    """Executes kernels of one gfx950 code object on emulated memory.

    Waves of a workgroup that stand at the same instruction run together, as do waves of up to
    `workgroups_at_once` workgroups; the results do not depend on it.

    Args:
        code: the code object.
        delayed_memory: results of loads stay poisoned until the matching s_waitcnt (and, across waves, a barrier):
            a missing wait or barrier is then an error.
        collect_hazards: in delayed-memory mode, note faults of timing in `hazards` (once an instruction and kind) and
            go on as if the data had arrived, instead of raising.
        workgroups_at_once: workgroups in flight.
        max_instructions: wave-instructions after which a launch is given up as endless.
        trace_lds: called as (group, instruction, byte addresses [W, 64], active lanes [W, 64], bytes a lane) for
            every LDS access.
    """

    def __init__(
        self,
        code: CodeObject,
        delayed_memory: bool = False,
        *,
        collect_hazards: bool = False,
        workgroups_at_once: int = 4,
        max_instructions: int = 2_000_000_000,
        trace_lds: Callable | None = None,
    ):
        if workgroups_at_once < 1:
            raise ValueError(f"workgroups_at_once is {workgroups_at_once}, want at least 1")
        self.code, self.delayed_memory, self.trace_lds = code, delayed_memory, trace_lds
        self.workgroups_at_once, self.max_instructions = workgroups_at_once, max_instructions
        self.collect_hazards = collect_hazards
        self.hazards: list[EmulatorError] = []
        self.memory, self.stats = GlobalMemory(), Stats()
        self._programs: dict[str, Program] = {}

    def launch(
        self,
        kernel_name: str | None,
        grid: tuple[int, int, int],
        block: int | tuple[int, int, int],
        kernarg: bytes,
        dynamic_lds: int = 0,
    ) -> None:
        """Run a kernel to its end.

        Args:
            kernel_name: name of the kernel, or None for the only one.
            grid: workgroups in x, y and z.
            block: threads of a workgroup (or in x, y, z): a multiple of 64, up to 1024.
            kernarg: the kernel arguments, as many bytes as the descriptor says.
            dynamic_lds: bytes of LDS on top of what the kernel declares.

        Raises:
            EmulatorError: the program did something undefined; names instruction, address, workgroup, wave and lane.
            CodeObjectError, ValueError: no such kernel, or arguments that do not fit it.
        """
        kernel = self.code.kernel(kernel_name)
        threads = (block, 1, 1) if isinstance(block, int) else tuple(block)
        total = int(np.prod(threads))
        if total % LANES or not 0 < total <= min(1024, kernel.max_workgroup_size):
            raise ValueError(
                f"block of {total} threads, want a multiple of 64 up to {min(1024, kernel.max_workgroup_size)}"
            )
        if len(grid) != 3 or min(grid) < 1:
            raise ValueError(f"grid is {grid}, want three counts of workgroups, each at least 1")
        if len(kernarg) != kernel.kernarg_bytes:
            raise ValueError(f"kernarg of {len(kernarg)} bytes, the kernel takes {kernel.kernarg_bytes}")
        if kernel.descriptor.scratch_bytes:
            raise CodeObjectError(
                f"{kernel.name} uses {kernel.descriptor.scratch_bytes} bytes of scratch, not modelled"
            )
        lds = kernel.descriptor.lds_bytes + dynamic_lds
        if lds > LDS_BYTES:
            raise ValueError(f"{lds} bytes of LDS, a compute unit has {LDS_BYTES}")
        if kernel.name not in self._programs:
            self._programs[kernel.name] = compile_program(kernel)
        launch = Launch(self, self._programs[kernel.name], tuple(grid), threads, kernarg, lds)
        start = time.perf_counter()
        try:
            with np.errstate(all="ignore"):
                launch.run()
        finally:
            self.stats.seconds += time.perf_counter() - start
            for inst, count in zip(kernel.program, launch.counts, strict=True):
                if count:
                    self.stats.by_mnemonic[inst.mnemonic] += count
                    self.stats.instructions += count
