"""The vector phase: from a tile's scores to the codes of P, and the rescaling of what was accumulated before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from ..instruction import Instruction, op
from ..registers import VCC, Reg
from .schedule import STREAMS, VECTOR
from .staging import NO_TOKEN
from .state import KEY_BLOCKS, State

MIN_EXPONENT = -100.0  # of a block below the row maximum: what lies lower is far below the last bit of the sum
OFFSET = 8  # B
CODE = "v_cvt_scalef32_pk_fp8_f32"
MAX3 = "v_maximum3_f32"  # hands NaN on, unlike v_max3: a row with a NaN score becomes NaN, and no other row


def deal(*streams: list[Instruction]) -> list[Instruction]:
    """Merge streams evenly: each advances in proportion to its length."""
    keyed = [((n + 0.5) / len(st), which, ins) for which, st in enumerate(streams) for n, ins in enumerate(st)]
    return [ins for _, _, ins in sorted(keyed, key=lambda k: k[:2])]


def _max(state: State, block: int) -> list[Instruction]:
    """Maximum of this lane's 32 scores of a 64-key block."""
    into, scores = state.block_max[block], state.s.group(block, 32)
    out = [op(MAX3, into, scores[0], scores[1], scores[2])]
    out += [op(MAX3, into, into, scores[n], scores[n + 1]) for n in range(3, 31, 2)]
    return [*out, op(MAX3, into, into, scores[31], scores[31])]


def _exchange(state: State) -> list[Instruction]:
    """Lanes l and l+32 hold different keys of one query: both get the maximum of both, and the running maximum."""
    first, second = state.block_max
    return [
        op("v_permlane32_swap_b32", first, second, note="low lanes: block 0 of both halves, high lanes: block 1"),
        op(MAX3, first, first, second, second),
        op("v_mov_b32", second, first),
        op("v_permlane32_swap_b32", first, second, note="block 0 everywhere, block 1 everywhere"),
        op(MAX3, state.new_max, state.row_max, first, second, note="m'"),
    ]


def _sums(state: State) -> list[Instruction]:
    """Row sums of the previous tile, which the matrix phase left in its spent operand buffers."""
    return [
        op("v_fmac_f32", state.row_sum, state.sums[half][0], state.block_scale[half], note="L += 2^(-k-B) sum P")
        for half in range(2)
    ]


def _exponents(state: State) -> list[Instruction]:
    """alpha, block exponents, and the biases that turn scores into codes."""
    lean = state.variant.lean
    d0, d1 = state.bias
    scale = state.code_scale if lean else state.scale
    out = [
        op("v_sub_f32", state.alpha, state.row_max, state.new_max),
        op("v_sub_f32", d0, state.block_max[0], state.new_max),
        op("v_sub_f32", d1, state.block_max[1], state.new_max),
        op("v_mul_f32", state.alpha, state.scale, state.alpha),
        op("v_mul_f32", d0, state.scale, d0),
        op("v_mul_f32", d1, state.scale, d1),
        op("v_exp_f32", state.alpha, state.alpha, note="alpha = 2^(m - m')"),
        op("v_ceil_f32", d0, d0),
        op("v_ceil_f32", d1, d1),
        op("v_max_f32", d0, state.min_exp, d0, note="-k of keys 0-63"),
        op("v_max_f32", d1, state.min_exp, d1, note="-k of keys 64-127"),
        op("v_fma_f32", state.base, -scale, state.new_max, state.code_bias, note="bias of a block with k = 0"),
        op("v_add_f32", state.block_exp[0], state.exp_magic, d0, note="low byte: 127 - B - k"),
        op("v_add_f32", state.block_exp[1], state.exp_magic, d1),
        op("v_cmp_neq_f32", VCC, state.new_max, state.row_max, note="rows whose maximum rose, or is NaN"),
        op("v_mov_b32", state.row_max, state.new_max),
        op("v_lshlrev_b32", state.block_scale[0], 23, state.block_exp[0], note="the same as a float"),
        op("v_lshlrev_b32", state.block_scale[1], 23, state.block_exp[1]),
    ]
    for bias in (d0, d1):
        if lean:
            out.append(op("v_fma_f32", bias, bias, state.neg_step, state.base, note="+ k binades"))
        else:
            out.append(op("v_sub_f32", bias, state.base, bias, note="+ k binades"))
    return out


def _staggered(stages: list[list[list[Instruction]]]) -> list[Instruction]:
    """Software pipeline: stage n of group g is placed beside stage n-1 of group g+1."""
    groups = len(stages[0])
    out: list[Instruction] = []
    for step in range(groups + len(stages) - 1):
        columns = [stages[n][step - n] for n in range(len(stages)) if 0 <= step - n < groups]
        out += [ins for row in zip_longest(*columns) for ins in row if ins is not None]
    return out


def _codes(state: State, block: int) -> list[Instruction]:
    """P's codes of a 64-key block: registers 4n .. 4n+3 of the scores become register n of P."""
    quads = [state.s.group(8 * block + n, 4) for n in range(8)]
    into = [state.p[8 * block + n] for n in range(8)]
    bias = state.bias[block]
    # A NaN score gives code 0: its row becomes NaN by alpha, and a NaN code would reach another query's row sum.
    return _lean(state, quads, into, bias) if state.variant.lean else _exact(state, quads, into, bias)


def _lean(state: State, quads: list[Reg], into: list[Reg], bias: Reg) -> list[Instruction]:
    """code = round(8c s + bias), saturating at 0; it can't pass 120, since no score passes the maximum."""
    fma = [[op("v_fma_f32", q[t], q[t], state.code_scale, bias) for t in range(4)] for q in quads]
    first = [[op("v_cvt_pk_u8_f32", p, q[0], 0, 0)] for q, p in zip(quads, into, strict=True)]
    rest = [[op("v_cvt_pk_u8_f32", p, q[t], t, p) for t in (1, 2, 3)] for q, p in zip(quads, into, strict=True)]
    return _staggered([fma, first, rest])


def _exact(state: State, quads: list[Reg], into: list[Reg], bias: Reg) -> list[Instruction]:
    """code = e4m3(2^y), to nearest even: 2^(y-B) clamped to [0, 1], which turns NaN into 0, then times 2^B."""
    fma = [[op("v_fma_f32", q[t], q[t], state.scale, bias) for t in range(4)] for q in quads]
    s = state.p_unit
    exp = [[op("v_exp_f32", q[t], q[t], mods="clamp") for t in range(4)] for q in quads]
    low = [[op(CODE, p, q[0], q[1], s)] for q, p in zip(quads, into, strict=True)]
    high = [[op(CODE, p, q[2], q[3], s, mods="op_sel:[0,0,0,1]")] for q, p in zip(quads, into, strict=True)]
    return _staggered([fma, exp, low, high])


def _outline(state: State, branch: str, name: str, block: Callable[[], None], note: str) -> None:
    """A block that is rarely needed, placed behind the end of the program: the usual path takes no branch."""
    program, number = state.program, len(state.program.body)
    away, back = f".L{name}{number}", f".L{name}{number}_done"
    program.op(branch, away, note=note)
    program.label(back)

    def place() -> None:
        program.label(away)
        block()
        program.op("s_branch", back)

    state.outlined.append(place)


def _mask(state: State) -> None:
    """Scores of keys that the query does not see become -inf."""

    def block() -> None:
        state.program.op("v_mov_b32", state.neg_inf, float("-inf"))
        for number in range(KEY_BLOCKS):
            _mask_block(state, number)

    _outline(state, "s_cbranch_scc0", "mask", block, "waves that do not see the whole tile mask it")


def _mask_block(state: State, block: int) -> None:
    """32 keys: all visible to the wave, none, or some (then a comparison a score)."""
    program, number = state.program, len(state.program.body)
    some, done = f".Lsome{number}", f".Ldone{number}"
    first, last = state.scratch[0], state.scratch[1]
    scores, m = state.s.group(block, 16), len(state.masks)
    program.op("s_add_i32", first, state.key0, 32 * block)
    program.op("s_add_i32", last, first, 31)
    program.op("s_cmp_le_i32", last, state.visible)
    program.op("s_cselect_b32", state.masks[0][0], first, NO_TOKEN)
    program.op("s_cmp_ge_i32", state.masks[0][0], state.low_last)
    program.op("s_cbranch_scc1", done)
    program.op("s_cmp_le_i32", first, state.reach)
    program.op("s_cselect_b32", state.masks[0][0], last, NO_TOKEN)
    program.op("s_cmp_ge_i32", state.masks[0][0], state.low_first)
    program.op("s_cbranch_scc1", some)
    for n in range(16):
        program.op("v_mov_b32", scores[n], state.neg_inf)
    program.op("s_branch", done)
    program.label(some)
    program.op("v_subrev_u32", state.rel, first, state.limit)
    for start in range(0, 16, m):
        keys = [(n, 8 * (n // 4) + n % 4) for n in range(start, start + m)]
        for n, key in keys:
            program.op("v_subrev_u32", state.offset[n % m], key, state.rel)
        for n, key in keys:
            program.op(
                "v_cmp_le_u32",
                state.masks[n % m],
                state.offset[n % m],
                state.span,
                note=f"key {32 * block + key} visible",
            )
        for n, _ in keys:
            program.op("v_cndmask_b32", scores[n], state.neg_inf, scores[n], state.masks[n % m])
    program.label(done)


def _rescale(state: State) -> None:
    """O and L times alpha, only if a row of the wave has a new maximum (else alpha is exactly 1)."""

    def block() -> None:
        state.program.op("v_mul_f32", state.row_sum, state.alpha, state.row_sum)
        # By now the other wave's matrix instructions are about done, and packed products need the matrix pipe idle.
        for n in range(32):
            pair = state.o.group(n, 2)
            state.program.op("v_pk_mul_f32", pair, pair, state.alpha_pair, mods="op_sel_hi:[1,0]")

    _outline(state, "s_cbranch_vccnz", "rescale", block, "rescale what was accumulated, if a maximum rose")


def vector_phase(state: State, first: bool = False) -> None:
    """Softmax of the current tile."""
    program = state.program
    _mask(state)
    streams = {
        "max 0": _max(state, 0),
        "max 1": _max(state, 1),
        "exchange": _exchange(state),
        "sums": [] if first else _sums(state),
        "exponents": _exponents(state),
        "codes 0": _codes(state, 0),
        "codes 1": _codes(state, 1),
    }
    for names in VECTOR:
        program.note("; ".join(STREAMS[name] for name in names))
        program.emit(deal(*(streams[name] for name in names)))
    if not first:
        _rescale(state)
