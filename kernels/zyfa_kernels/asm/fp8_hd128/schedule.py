"""The schedule of the fp8 head-dim-128 kernels, as tables that the generator walks.

A tile of 128 keys takes a wave two phases, each closed by a barrier: in the matrix phase it computes the scores of
tile i and adds tile i-1 to its output; in the vector phase it turns the scores into P. Waves 4-7 run one phase behind
waves 0-3, so the two waves of a SIMD are always in different phases.

MATRIX: `QK b d` is key block b (32 keys) x head-dim half d; `PV b h` is value-dim block b x key half h (64 keys);
`SUM h` the row sum of key half h. In the shadow of each stand the LDS reads of the fragment that the matrix instruction
LOOKAHEAD places further on needs, and a share of JOBS (`staging.job`), dealt out evenly in order.
"""

from __future__ import annotations

LOOKAHEAD = 3

MATRIX: tuple[str, ...] = (
    "QK 0 0", "QK 1 0", "QK 0 1", "QK 1 1", "QK 2 0", "QK 3 0", "QK 2 1", "QK 3 1",
    "PV 0 0", "PV 1 0", "PV 2 0", "PV 3 0", "PV 0 1", "PV 1 1", "SUM 0", "PV 2 1", "SUM 1", "PV 3 1",
)  # fmt: skip

JOBS: tuple[str, ...] = (
    "address k 0", "load k 0", "address k 1", "load k 1",
    "address v 0", "load v 0", "address v 1", "load v 1",
    "next", "visible",
)  # fmt: skip

# Behind the last matrix instruction: scalar loads and SCC, which nothing may disturb before the barrier.
LAST_JOBS: tuple[str, ...] = ("pages", "test")

# The vector phase: streams in order; streams that stand together are dealt out one instruction each in turn.
VECTOR: tuple[tuple[str, ...], ...] = (
    ("max 0", "max 1"),
    ("exchange", "sums"),
    ("exponents",),
    ("codes 0",),
    ("codes 1",),
)

STREAMS = {
    "max 0": "maximum of keys 0-63",
    "max 1": "maximum of keys 64-127",
    "exchange": "maximum over both halves of the lanes, and the running one",
    "sums": "row sums of the tile before",
    "exponents": "factor of what was accumulated, block exponents, biases",
    "codes 0": "P of keys 0-63",
    "codes 1": "P of keys 64-127",
}


def fragments() -> list[tuple[str, int, int]]:
    """Operands read from LDS in the order of use: ("QK" or "PV", block, half)."""
    rows = (row.split() for row in MATRIX)
    return [(name, int(b), int(h[0])) for name, b, *h in rows if name != "SUM"]
