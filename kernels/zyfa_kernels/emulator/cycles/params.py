"""Parameters of the cycle model, each with its source. Change them here only."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Parameters:
    """Cycles are of the shader clock. `SOURCES` says where each value comes from."""

    slot: int = 4
    valu: int = 4
    trans: int = 8
    quarter_rate: int = 16
    half_rate: int = 8
    mfma_issue: int = 16
    packed_fp32_beside_mfma: bool = False
    lds_bytes_per_cycle: int = 128
    lds_latency: int = 64
    dma_latency: int = 800
    dma_bytes_per_cycle: int = 64
    scalar_load_latency: int = 200
    barrier: int = 16
    branch_taken: int = 16
    simds: int = 4
    compute_units: int = 256
    clock_ghz: float = 2.4

    def table(self) -> list[tuple[str, object, str]]:
        """(name, value, source) of every parameter."""
        return [(f.name, getattr(self, f.name), SOURCES[f.name]) for f in fields(self)]


SOURCES = {
    "slot": "an issue slot a SIMD every 4 cycles, one instruction a wave and one a pipe in each (GCN3, CDNA3 ISA)",
    "valu": "a wave64 instruction holds its SIMD's vector pipe for 4 cycles (16 lanes a cycle)",
    "trans": "v_exp_f32 8 cycles on gfx950 (published instruction budgets)",
    "quarter_rate": "v_mul_lo_u32, v_mul_hi_u32, v_mad_u64_u32: a quarter of the rate (LLVM's Quarter rate)",
    "half_rate": "64-bit shifts and swaps between lanes: two passes (llvm-mca for gfx950: 2 micro-operations)",
    "mfma_issue": "a matrix instruction keeps vector instructions of its SIMD from issuing for 4 passes (calibrated: of"
    " 4, 16 and 24 the value under which one clock factor explains AITER's v4 int8 kernel beside its others)",
    "packed_fp32_beside_mfma": "packed fp32 waits while a matrix instruction runs on the SIMD (published observation)",
    "lds_bytes_per_cycle": "reads of 128 B a cycle and compute unit (reported of CDNA 4; a 256 B phase of HipKittens' "
    "measurements then takes two cycles). With 256 the clock factors of AITER's kernels spread more",
    "lds_latency": "from issue to data without a queue (assumed from CDNA3's 64 cycles)",
    "dma_latency": "load into LDS from L2 or HBM (assumed; loops that prefetch a block ahead do not depend on it)",
    "dma_bytes_per_cycle": "vector L1 to LDS, 64 B a cycle (assumed from CDNA3)",
    "scalar_load_latency": "scalar cache hit (assumed)",
    "barrier": "from the last arrival to the next issue (assumed)",
    "branch_taken": "refetch after a taken branch (assumed)",
    "simds": "SIMDs of a compute unit (CDNA ISA)",
    "compute_units": "MI355X",
    "clock_ghz": "peak engine clock of MI355X; sustained clocks under matrix load are lower",
}
