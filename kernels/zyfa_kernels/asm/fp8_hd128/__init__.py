"""FP8 attention with query-key and value head dimension 128, causal and full, exact and lean P.

Grouped queries, a scale per query row and head, scales of K and V per head, packed or paged keys, context, window.
Per tile of 128 keys and wave: 1,088 matrix cycles (16 products, two half-size row sums), and on the vector pipe lean P
2 instructions a score (exact P 3.5 slots), half a one for the maximum, and about 30 for exponents and bookkeeping.

Scores stay below 2^24 in log2 units: beyond, the rounding of c * maximum to fp32 can lift a P over 448, and the row is
NaN. Models are orders of magnitude away from it.

Variants tried, by the cycle model (`zyfa kernels cycles`; all figures modelled: cycles of a SIMD for one block of both
of its waves, and the share in which the matrix pipe runs). AITER's v3 fp8 causal kernel takes 3712 (0.552) there.

| variant | lean | exact |
|---|---|---|
| as generated, in a tile in which no maximum of the wave's 32 rows rises | 2304 (0.944) | 2952 (0.737) |
| first schedule: K read ahead in the vector phase, masks and rescaling in line | 2449 (0.889) | 3044 (0.715) |
| read ahead in the matrix phase, rare blocks out of line; staging jobs in fixed places | 2328 (0.935) | 2952 (0.737) |
| the same, staging jobs dealt out evenly | 2304 (0.944) | 2952 (0.737) |
| without s_setprio around the matrix phase | 2956 (0.733) | 3658 (0.592) |
| operands read 2 instead of 3 matrix instructions ahead | 2442 (0.891) | 2944 (0.739) |
| row sum by 32x32x64: 128 instead of 64 cycles a tile | 2330 (0.989, of which 0.06 for nothing) | 2952 (0.780) |
| lean codes by v_cvt_pknorm_u16 and v_perm: 1.75 instructions a score instead of 2 | 2304 (0.944) | |
| every tile rescales, v_mul | 2758 (0.789) | 3528 (0.617) |
| every tile rescales, v_pk_mul (as generated) | 2554 (0.852) | 3272 (0.665) |
| as generated, LDS reads of 256 B a cycle instead of 128 | 2192 (0.993) | 2952 (0.737) |
| as generated, a matrix instruction blocks the vector port for 4 cycles instead of 16 | 2304 (0.944) | 2514 (0.866) |

A tile in which one rises rescales, and the table's row of that case holds. In text it is the rarer one (SmolLM2-135M,
10 layers, 2,048 tokens, causal: 27% of the tiles after the first, 97% in layer 0), in Gaussian scores the usual one
(96% of the tiles at S = 2,048, 77% at 8,192).

Lean P ends at the LDS: 256 KiB read and 32 KiB written a tile are 2,304 cycles at 128 B a cycle, whatever the order.
Exact P ends at the vector pipe: 1,144 cycles of its own and 288 in which matrix instructions hold the port.

Not built, and why. The addend of lean P in the scores' C operand: the factor 8c is an arbitrary fp32 of the query, so
the multiplication stays and nothing is saved, while a C of 16 registers must be filled and mended when a maximum rises.
pknorm codes: cheaper, but not the roundings of the specification's formula, for no time won. A running maximum in half
precision or renewed less often: the largest P would not be exact.
"""

from __future__ import annotations

from types import MappingProxyType

from ..kernel import Kernel
from . import epilogue, matrix, prologue, staging, vector
from .arguments import ARGUMENTS
from .layout import LDS_BYTES, STAGES, TILE_BYTES, TILE_KEYS, WAVES
from .state import State, Variant

VARIANTS = tuple(Variant(causal, lean) for causal in (True, False) for lean in (True, False))

PROSE = (
    "",
    "A workgroup of 8 waves takes 256 queries of one head, 32 a wave, and walks the keys in tiles of 128.",
    "S^T = K Q^T leaves one query per lane; P^T is formed in place as the second operand of O^T = V^T P^T.",
    "Waves 0-3 and 4-7 alternate: of the two waves of a SIMD one runs its matrix phase while the other forms P.",
)


def _barrier(state: State, note: str = "") -> None:
    state.program.op("s_barrier", note=note)


def _loop(state: State) -> None:
    """The tile loop, one copy a stage so that LDS offsets are constants; the last tile is always in the last stage."""
    p = state.program
    for stage in range(STAGES):
        p.label(f".Lstage{stage}")
        p.op("s_add_i32", state.key0, state.key0, TILE_KEYS)
        p.title(f"Stage {stage}, matrix phase")
        matrix.matrix_phase(state, stage)
        p.wait_loads(-1, "K of the tile after the next and V of the next have landed")
        _barrier(state)
        p.title(f"Stage {stage}, vector phase")
        vector.vector_phase(state)
        _barrier(state)
        p.waits.age()
    p.op("s_cmp_lt_i32", state.key0, state.key_last0)
    p.op("s_cbranch_scc1", ".Lstage0")


def _first_tile(state: State) -> None:
    """Scores and P of tile 0, whose stage is in a register; then into the loop at the stage that follows."""
    p = state.program
    temporary = state.o.group(0, 4)  # free until the constants are set
    p.title("First tile, matrix phase: scores only")
    for n in range(4):
        p.op("v_add_u32", temporary[n], state.stage, state.k_addr[n])
    p.note("K of tile 3 and V of tile 2")
    staging.first_tile(state, "k", 3, state.k_pages, 0)
    staging.first_tile(state, "v", 2, state.v_pages, 0)
    matrix.scores_only(state, temporary)
    p.op("s_add_u32", state.stage, state.stage, TILE_BYTES)
    p.op("s_and_b32", state.stage, state.stage, STAGES * TILE_BYTES - 1, note="stage of tile 1")
    for n in range(4):
        p.op("v_add_u32", temporary[n], state.stage, state.k_addr[n])
    matrix.read_ahead(state, temporary)
    p.op("s_add_i32", state.token, state.token, 3 * TILE_KEYS)
    for text in ("next", "visible", "pages", "test"):
        p.emit(staging.job(state, text, 0))
    p.wait_loads(-1, "K of tile 2 and V of tile 1 have landed")
    _barrier(state)
    p.title("First tile, vector phase")
    vector.vector_phase(state, first=True)
    for n in range(4):
        p.op("v_mov_b32", temporary[n], 0.0)
    _barrier(state)
    p.waits.age()
    p.op("s_cmp_eq_u32", state.tiles, 1)
    p.op("s_cbranch_scc1", ".Llast")
    for stage in range(1, STAGES):
        p.op("s_cmp_eq_u32", state.stage, stage * TILE_BYTES)
        p.op("s_cbranch_scc1", f".Lstage{stage}")


def build(variant: Variant) -> Kernel:
    """Generate one kernel of the family."""
    state = State(variant)
    p = state.program
    prologue.arguments(state)
    prologue.addresses(state)
    prologue.first_loads(state)
    prologue.queries(state)
    prologue.constants(state)
    prologue.ones(state)
    prologue.lds_addresses(state)
    p.op("s_cmp_eq_u32", state.tiles, 0)
    p.op("s_cbranch_scc1", ".Lempty")
    p.wait_loads(-2, "K of tiles 0 and 1, V of tile 0")
    _barrier(state)
    p.op("s_cmp_lt_i32", state.wave, WAVES // 2)
    p.op("s_cbranch_scc1", ".Lfirst")
    _barrier(state, "waves 4-7 start one phase later")
    p.label(".Lfirst")
    _first_tile(state)
    _loop(state)
    p.label(".Llast")
    p.title("Output of the last tile")
    matrix.output_only(state, STAGES - 1)
    p.emit(vector._sums(state))
    p.wait_all()
    p.op("s_cmp_lt_i32", state.wave, WAVES // 2)
    p.op("s_cbranch_scc0", ".Loutput")
    _barrier(state, "waves 0-3 end one phase earlier")
    p.op("s_branch", ".Loutput")
    p.label(".Lempty")
    p.wait_all()
    p.label(".Loutput")
    epilogue.output(state)
    p.title("Blocks that are rarely needed")
    for place in state.outlined:
        place()
    p.verify()
    return Kernel(
        variant.name,
        p,
        ARGUMENTS,
        LDS_BYTES,
        64 * WAVES,
        PROSE,
        MappingProxyType(
            {"qk_dim": 128, "v_dim": 128, "format": "fp8_e4m3", "causal": variant.causal, "lean": variant.lean}
        ),
    )
