"""The register map of the fp8 head-dim-128 kernels: every register of the kernel by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..program import Program
from ..registers import Reg
from .arguments import ARGUMENTS
from .layout import STAGES, TILE_BYTES

FRAGMENTS = 4  # operand buffers of 8 registers; fragment n of a tile goes to buffer n % 4
KEY_BLOCKS = 4  # 32-key accumulators of S^T in a tile of 128 keys
DV_BLOCKS = 4  # 32-row accumulators of O^T


@dataclass(frozen=True)
class Variant:
    """What distinguishes the kernels of the family."""

    causal: bool
    lean: bool

    @property
    def name(self) -> str:
        return f"fp8-hd128-{'causal' if self.causal else 'full'}-{'lean' if self.lean else 'exact'}"


class State:
    """Named registers, allocated once; `program` receives the instructions."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.program = Program(variant.name)
        self.outlined: list[Callable[[], None]] = []  # blocks to place behind the end of the program
        self._vector()
        self._scalar()

    def _vector(self) -> None:
        v = self.program.vgprs.alloc
        self.o = v("o", 64, "O^T, four blocks of 32 value dims x 32 queries", align=4)
        self.s = v("s", 64, "S^T, four blocks of 32 keys x 32 queries; P's codes are formed in place", align=4)
        self.q = v("q", 16, "Q^T operand: four quarters of 32 bytes of head dim", align=4)
        self.p = v("p", 16, "P^T operand: codes of two 64-key blocks", align=4)
        self.ones = v("ones", 8, "row-sum operand: 1.0 where row and key group belong to one query", align=4)
        self.frag = v("frag", 8 * FRAGMENTS, "operand buffers for K and V fragments", align=4)
        place = self.program.vgprs.place
        self.sums = (v("sum0", 4, "row sum of P over keys 0-63"), v("sum1", 4, "over keys 64-127"))
        self.k_addr = v("k_addr", 4, "LDS address of K per head-dim quarter")
        self.v_addr = v("v_addr", 4, "LDS address of V per value-dim block")
        self.k_off = v("k_off", 1, "offset of the 16 bytes of K that this lane stages, in a group of 8 rows")
        self.v_off = v("v_off", 1, "the same for V")
        self.scale = v("scale", 1, "c: log2 units of one accumulator unit, per query")
        self.code_scale = v("code_scale", 1, "lean P: 8 c, codes per accumulator unit")
        self.row_max = v("row_max", 1, "m / c: running maximum in accumulator units")
        self.new_max = v("new_max", 1, "the same after this tile")
        self.row_sum = v("row_sum", 1, "L")
        self.block_max = (v("block_max0", 1, "maximum over keys 0-63"), v("block_max1", 1, "over keys 64-127"))
        self.alpha_pair = v("alpha_pair", 2, "alpha and base: packed products take an aligned pair")
        self.alpha = place("alpha", self.alpha_pair[0], "2^(m - m')")
        self.base = place("base", self.alpha_pair[1], "bias of the code before the block exponent")
        self.bias = (v("bias0", 1, "bias of keys 0-63; first -k of the block"), v("bias1", 1, "of keys 64-127"))
        self.rel = place("rel", self.base, "masking: last visible key, relative to the block")
        self.offset = place("offset", self.frag.group(3, 8), "masking: distance of a key from the last visible one")
        self.neg_inf = place("neg_inf", self.bias[0], "masking: -inf")
        self.block_exp = (v("block_exp0", 1, "low byte: E8M0 of 2^(-k-B), keys 0-63"), v("block_exp1", 1, "64-127"))
        self.block_scale = (v("block_scale0", 1, "2^(-k-B) as a float, keys 0-63"), v("block_scale1", 1, "64-127"))
        self.unit = v("unit", 1, "E8M0 of 1.0, the scale of V")
        self.limit = v("limit", 1, "last visible key of the query, minus 4 in lanes 32-63")
        self.span = v("span", 1, "last minus first visible key of the query")
        self.lane = v("lane", 1, "lane number (set-up and output)")

    def _scalar(self) -> None:
        s = self.program.sgprs.alloc
        self.kernarg = s("kernarg", 2, "address of the arguments")
        self.wg = s("wg", 3, "workgroup id x, y, z", align=1)
        self.wave = s("wave", 1, "wave 0-7 of the workgroup")
        self.k_desc = s("k_desc", 4, "buffer descriptor of the next K rows to stage")
        self.v_desc = s("v_desc", 4, "of the next V rows to stage")
        self.io_desc = s("io_desc", 4, "of Q, then of the scales, of the output")
        self.lds_wave = s("lds_wave", 1, "where this wave stages inside a tile")
        self.stage = s("stage", 1, "stage of the first tile, in bytes")
        self.tiles = s("tiles", 1, "tiles of 128 keys")
        self.key0 = s("key0", 1, "first key of the current tile")
        self.key_last0 = s("key_last0", 1, "first key of the last tile")
        self.visible = s("visible", 1, "keys up to here need no mask in this wave")
        self.reach = s("reach", 1, "no query of this wave sees a key beyond this one")
        self.code_bias = s("code_bias", 1, "argument")
        self.p_unit = s("p_unit", 1, "exact P: 2^-B, by which codes are divided")
        self.neg_step = s("neg_step", 1, "lean P: minus one binade in code units")
        self.exp_magic = s("exp_magic", 1, "1.5 * 2^23 + 127 - B")
        self.min_exp = s("min_exp", 1, "smallest block exponent")
        self.q_start = s("q_start", 1, "first query token of the sequence")
        self.q_len = s("q_len", 1, "query tokens of the sequence")
        self.row0 = s("row0", 1, "first query row of this wave, in the sequence")
        self.head = s("head", 1, "query head")
        self.masks = tuple(s(f"mask{i}", 2, "lanes whose query sees the key") for i in range(8))
        place = self.program.sgprs.place
        self.q_span = place("q_span", self.masks[1], "set-up: cu_seqlens_q of the sequence and the next")
        self.k_span = self.masks[2]
        self.k_start = place("k_start", self.k_span[0], "set-up: first key token")
        self.k_len = place("k_len", self.k_span[1], "set-up: key tokens")
        self.context = place("context", self.masks[3][0], "set-up: keys before the first query")
        self.kv_head = place("kv_head", self.masks[3][1], "set-up: KV head")
        self.scratch = place("scratch", self.masks[4], "products and comparisons of the moment")
        self.head_k_scale = place("head_k_scale", self.masks[5][0], "set-up: K scale of the head")
        self.pages0 = place("pages0", self.masks[6], "set-up: pages of tile 0")
        self.pages1 = place("pages1", self.masks[7], "set-up: pages of tile 1")
        self.stage_tmp = tuple(
            place(f"stage_tmp{n}", reg, "staging: token and products")
            for n, reg in enumerate((self.masks[0][0], self.masks[0][1], self.masks[5][1]))
        )
        self.head_v_scale = s("head_v_scale", 1, "V scale of the head")
        self.ptr = s("ptr", 16, "arguments q, k, v, out, lse, q_scale, k_scale, v_scale", align=4)
        self.cu = s("cu", 4, "arguments cu_seqlens_q, cu_seqlens_k", align=4)
        self.arg = s("arg", 16, "arguments block_table .. page_shift", align=4)
        self.tail = s("tail", 12, "arguments k_page .. code_bias", align=4)
        self.table = self.arg[0:1]
        self.k_pages = place("k_pages", self.cu[0:1], "loop: pages of the next K rows to stage")
        self.v_pages = place("v_pages", self.cu[2:3], "loop: pages of the next V rows")
        self.token = place("token", self.wg[0], "loop: first token that this wave stages of the next K tile")
        self.last_key = place("last_key", self.wg[1], "loop: last key that any row of the workgroup sees")
        self.page_mask = place("page_mask", self.wg[2], "loop: tokens of a page minus 1")
        self.low_last = place("low_last", self.kernarg[0], "loop: first key that the wave's last query sees")
        self.low_first = place("low_first", self.kernarg[1], "loop: first key that the wave's first query sees")

    def arg_of(self, name: str) -> Reg:
        """The scalar register that holds an argument."""
        offset = ARGUMENTS.offsets[name]
        for reg, start in ((self.ptr, 0), (self.cu, 64), (self.arg, 80), (self.tail, 144)):
            index = (offset - start) // 4
            if 0 <= index < reg.count:
                wide = dict((n, k) for n, k, _ in ARGUMENTS.fields)[name] == "pointer"
                return replace(reg[index : index + 1] if wide else reg[index], name=name)
        raise KeyError(name)


def stage_offset(stage: int) -> int:
    """LDS bytes of a stage, for the offset field of reads."""
    return (stage % STAGES) * TILE_BYTES
