"""Machine code to instructions, in one form that the executor, the checks and the cycle model share.

The bit fields, opcode names and operand widths come from tinygrad's CDNA tables, which are generated from AMD's own
machine-readable ISA XML; tests compare the text with llvm-objdump where that is installed. This module adds what the
tables lack: AccVGPR selection, one numbering of all registers, roles of operands, and assembler syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tinygrad.renderer.amd import decode_inst

from .errors import UnknownInstruction

# One numbering for every register: scalar ones as the ISA encodes them, then VGPRs, then AccVGPRs.
VCC, TTMP, M0, EXEC, SCC = 106, 108, 124, 126, 128
VGPR, AGPR, END = 256, 512, 768
SPECIAL = {
    106: "vcc_lo",
    107: "vcc_hi",
    124: "m0",
    126: "exec_lo",
    127: "exec_hi",
    128: "scc",
    102: "flat_scratch_lo",
    103: "flat_scratch_hi",
    104: "xnack_mask_lo",
    105: "xnack_mask_hi",
}
PAIRS = {106: "vcc", 126: "exec", 102: "flat_scratch", 104: "xnack_mask"}
INLINE_FLOAT = {
    240: 0.5,
    241: -0.5,
    242: 1.0,
    243: -1.0,
    244: 2.0,
    245: -2.0,
    246: 4.0,
    247: -4.0,
    248: 0.15915494309189532,
}
SHARED_SOURCES = {
    235: "src_shared_base",
    236: "src_shared_limit",
    237: "src_private_base",
    238: "src_private_limit",
    251: "src_vccz",
    252: "src_execz",
    253: "src_scc",
    254: "src_lds_direct",
}


def register_name(number: int, count: int = 1) -> str:
    """Assembler name of `count` registers that start at unified `number`."""
    if number >= VGPR:
        letter, first = ("v", number - VGPR) if number < AGPR else ("a", number - AGPR)
    elif count == 2 and number in PAIRS:
        return PAIRS[number]
    elif number in SPECIAL:
        return SPECIAL[number]
    elif TTMP <= number < TTMP + 16:
        letter, first = "ttmp", number - TTMP
    elif number < 102:
        letter, first = "s", number
    else:
        return f"src{number}"
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand: registers (`reg` >= 0, `count` of 32 bits each), an inline or literal constant, or a special source.

    `value` holds a constant: an int, or a float for the inline float constants (their bits depend on the operand
    width). `bits` is the operand's width in bits (16, 32, 64, …).
    """

    reg: int = -1
    count: int = 1
    value: int | float | None = None
    literal: bool = False
    special: str = ""
    bits: int = 32
    neg: bool = False
    abs: bool = False

    @property
    def regs(self) -> range:
        return range(self.reg, self.reg + self.count) if self.reg >= 0 else range(0)


@dataclass(slots=True)
class Instruction:
    """A decoded instruction.

    Attributes:
        index: position in the program; address: byte address in the code object; size: bytes; raw: its bytes.
        mnemonic: LLVM's name without ``_e32``/``_e64``/``_dpp``/``_sdwa``.
        encoding: SOP1, SOP2, SOPC, SOPK, SOPP, SMEM, VOP1, VOP2, VOPC, VOP3, VOP3P, MFMA, DS, MUBUF, FLAT, GLOBAL.
        variant: "", "dpp" or "sdwa".
        operands: by role (vdst, sdst, src0, src1, src2, vaddr, saddr, srsrc, soffset, data0, data1, scale0, scale1).
        mods: modifiers and immediates by name (offset, opsel, cbsz, simm16, …).
    """

    index: int
    address: int
    size: int
    raw: bytes
    mnemonic: str
    encoding: str
    variant: str
    operands: dict[str, Operand]
    mods: dict[str, int] = field(default_factory=dict)
    suffix: str = ""

    @property
    def text(self) -> str:
        from .disasm import format_instruction

        return format_instruction(self)

    @property
    def target(self) -> int | None:
        """Byte address that a direct branch goes to, or None."""
        if self.mnemonic.startswith(("s_branch", "s_cbranch")):
            offset = self.mods["simm16"]
            return self.address + 4 + 4 * (offset - 0x10000 if offset >= 0x8000 else offset)
        return None


_SUFFIX = re.compile(r"_(E32|E64|SDWA|DPP)$")
_SCALE_PREFIX = 0xD3AC  # first 16 bits of the 16-byte scaled MFMA; the tables match it by its second half alone
_MODS = (
    "offset",
    "offset0",
    "offset1",
    "offen",
    "idxen",
    "lds",
    "sc0",
    "sc1",
    "nt",
    "gds",
    "glc",
    "omod",
    "clmp",
    "opsel",
    "opsel_hi",
    "opsel_hi2",
    "neg_hi",
    "cbsz",
    "blgp",
    "abid",
    "simm16",
    "dpp",
    "bc",
    "row_mask",
    "bank_mask",
    "dst_sel",
    "dst_unused",
    "src0_sel",
    "src1_sel",
    "src0_sext",
    "src1_sext",
    "imm",
    "soffset_en",
)
_PKF32 = ("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32", "v_pk_mov_b32")


def _source(raw: int, count: int, bits: int, literal: int | None, acc: bool = False) -> Operand:
    if raw >= VGPR:
        return Operand(reg=raw + (VGPR if acc else 0), count=count, bits=bits)
    if raw < 128:
        return Operand(reg=raw, count=count, bits=bits)
    if raw <= 192:
        return Operand(value=raw - 128, bits=bits)
    if raw <= 208:
        return Operand(value=192 - raw, bits=bits)
    if raw in INLINE_FLOAT:
        return Operand(value=INLINE_FLOAT[raw], bits=bits)
    if raw == 255:
        return Operand(value=literal, literal=True, bits=bits)
    return Operand(special=SHARED_SOURCES.get(raw, f"src{raw}"), bits=bits)


def _field(inst, name: str) -> int | None:
    bitfield = getattr(type(inst), name, None)
    return None if bitfield is None else (inst._raw >> bitfield.lo) & bitfield.mask


def decode_one(data: bytes, index: int, address: int) -> Instruction:
    """Decode the instruction at the start of `data` (16 bytes suffice). Raises UnknownInstruction."""
    try:
        scaled = int.from_bytes(data[2:4], "little") == _SCALE_PREFIX
        inst = decode_inst(data[:16] if scaled else data[:8].ljust(8, b"\0"), "cdna")
        name = inst.op.name
    except (ValueError, AttributeError) as error:
        word = int.from_bytes(data[:4], "little")
        raise UnknownInstruction(
            "unknown-instruction", f"no gfx950 encoding matches word {word:#010x}", address=address
        ) from error
    form = type(inst).__name__
    variant = "dpp" if "DPP" in form else "sdwa" if "SDWA" in form else ""
    # VOP3_SDST differs from VOP3 only in the kind of its destination field, which is told apart by mnemonic below.
    encoding = form.split("_")[0]
    if form == "VOP3P_MFMA" or form == "VOP3PX2":
        encoding = "MFMA"
    mnemonic = _SUFFIX.sub("", name).lower()
    if mnemonic in ("v_accvgpr_read", "v_accvgpr_write"):
        mnemonic += "_b32"
    if encoding == "VOP3P" and mnemonic.startswith(("v_mfma", "v_smfmac", "v_accvgpr")):
        encoding = "MFMA"
    widths = inst.op_bits
    literal = _field(inst, "literal")
    mods = {m: v for m in _MODS if (v := _field(inst, m)) is not None}
    if literal is not None:
        mods["literal"] = literal
    neg, absolute = _field(inst, "neg") or 0, _field(inst, "abs") or 0
    if variant:
        neg = (_field(inst, "src0_neg") or 0) | (_field(inst, "src1_neg") or 0) << 1
        absolute = (_field(inst, "src0_abs") or 0) | (_field(inst, "src1_abs") or 0) << 1
    if encoding == "MFMA":
        neg = absolute = 0  # those bits select formats here
    if mnemonic == "v_bitop3_b32":
        mods["bitop3"], neg, absolute = mods["omod"] << 6 | absolute << 3 | neg, 0, 0
    acc = _field(inst, "acc") or 0
    acc_cd = _field(inst, "acc_cd") or 0

    def size_of(role: str, default: int = 32) -> tuple[int, int]:
        bits = widths.get(role, default)
        return max(1, (bits + 31) // 32), bits

    operands: dict[str, Operand] = {}

    def vector_source(role: str, raw: int, position: int, table_role: str | None = None) -> None:
        count, bits = size_of(table_role or role)
        use_acc = bool(acc_cd) if (encoding == "MFMA" and role == "src2") else bool(acc >> position & 1)
        base = _source(raw, count, bits, literal, use_acc and encoding == "MFMA")
        if (neg >> position | absolute >> position) & 1:
            base = Operand(
                base.reg,
                base.count,
                base.value,
                base.literal,
                base.special,
                base.bits,
                bool(neg >> position & 1),
                bool(absolute >> position & 1),
            )
        operands[role] = base

    if encoding in ("SOP1", "SOP2", "SOPC", "SOPK"):
        if encoding != "SOPC" and not mnemonic.startswith(("s_setpc", "s_cbranch", "s_rfe", "s_cmpk")):
            count, bits = size_of("sdst")
            operands["sdst"] = Operand(reg=_field(inst, "sdst"), count=count, bits=bits)
        if mnemonic.startswith("s_cmpk"):
            operands["src0"] = Operand(reg=_field(inst, "sdst"))
        for position in (0, 1):
            raw = _field(inst, f"ssrc{position}")
            if raw is not None and f"ssrc{position}" in widths:
                count, bits = size_of(f"ssrc{position}")
                operands[f"src{position}"] = _source(raw, count, bits, literal)
    elif encoding == "SMEM":
        if "sdata" in widths:
            count, bits = size_of("sdata")
            operands["sdst"] = Operand(reg=_field(inst, "sdata"), count=count, bits=bits)
        if "sbase" in widths:
            count, bits = size_of("sbase")
            operands["saddr"] = Operand(reg=_field(inst, "sbase") * 2, count=count, bits=bits)
        if mods["soffset_en"]:
            operands["soffset"] = Operand(reg=_field(inst, "soffset"))
        elif not mods["imm"]:
            operands["soffset"] = Operand(reg=mods.pop("offset") & 0x7F)
        if "offset" in mods and mods["offset"] & 1 << 20:
            mods["offset"] -= 1 << 21
    elif encoding in ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3P", "VOP3SD", "MFMA"):
        if encoding == "VOP3SD":
            encoding = "VOP3"
            operands["sdst"] = Operand(reg=_field(inst, "sdst"), count=2, bits=64)
        raw = _field(inst, "vdst")
        if encoding == "VOPC":
            scalar = VCC
            if variant == "sdwa" and _field(inst, "sd"):
                scalar = _field(inst, "sdst")
            operands["sdst"] = Operand(reg=scalar, count=2, bits=64)
        elif encoding == "VOP3" and (mnemonic.startswith("v_cmp") or mnemonic.startswith("v_readlane")):
            count, bits = size_of("vdst", 64)
            operands["sdst"] = Operand(reg=raw, count=count, bits=bits)
        elif mnemonic == "v_readfirstlane_b32":
            operands["sdst"] = Operand(reg=raw)
        elif raw is not None and mnemonic not in ("v_nop", "v_clrexcp"):
            count, bits = size_of("vdst")
            operands["vdst"] = Operand(
                reg=raw + VGPR + (VGPR if acc_cd and encoding == "MFMA" else 0), count=count, bits=bits
            )
        if mnemonic in ("v_accvgpr_write_b32", "v_accvgpr_mov_b32"):
            operands["vdst"] = Operand(reg=raw + AGPR)
        for position in (0, 1, 2):
            role = f"src{position}"
            field_name = role if role in type(inst).__dict__ or hasattr(type(inst), role) else None
            vfield = "v" + role
            if variant and position == 0:
                raw = _field(inst, "vsrc0")
                s0 = _field(inst, "s0")
                raw = raw if s0 else raw + VGPR
                if role in widths or vfield in widths:
                    vector_source(role, raw, 0)
            elif hasattr(type(inst), vfield) and vfield in widths:
                raw = _field(inst, vfield)
                if not (variant == "sdwa" and position == 1 and _field(inst, "s1")):
                    raw += VGPR
                vector_source(role, raw, position, vfield)
            elif field_name and role in widths:
                vector_source(role, _field(inst, field_name), position)
        if mnemonic in ("v_accvgpr_read_b32", "v_accvgpr_mov_b32"):
            source = operands["src0"]
            operands["src0"] = Operand(reg=source.reg % VGPR + AGPR)
        if form == "VOP3PX2":
            operands["scale0"] = _source(_field(inst, "scale_src0"), 1, 32, literal)
            operands["scale1"] = _source(_field(inst, "scale_src1"), 1, 32, literal)
    elif encoding == "DS":
        letter = VGPR + (VGPR if acc & 1 else 0)
        if "addr" in widths:
            operands["vaddr"] = Operand(reg=_field(inst, "addr") + VGPR)
        for role in ("vdst", "data0", "data1"):
            if role in widths:
                count, bits = size_of(role)
                operands[role] = Operand(reg=_field(inst, role) + letter, count=count, bits=bits)
        if "offset" not in mods:
            mods["offset"] = mods["offset0"] | mods["offset1"] << 8
    elif encoding == "MUBUF":
        letter = VGPR + (VGPR if acc & 1 else 0)
        if "vdata" in widths and not mods["lds"]:
            count, bits = size_of("vdata")
            role = "data0" if "store" in mnemonic else "vdst"
            operands[role] = Operand(reg=_field(inst, "vdata") + letter, count=count, bits=bits)
        if mods["offen"] or mods["idxen"]:
            operands["vaddr"] = Operand(reg=_field(inst, "vaddr") + VGPR, count=mods["offen"] + mods["idxen"])
        if "srsrc" in widths:
            operands["srsrc"] = Operand(reg=_field(inst, "srsrc") * 4, count=4, bits=128)
            operands["soffset"] = _source(_field(inst, "soffset"), 1, 32, None)
        mods["dwords"] = size_of("vdata")[0] if "vdata" in widths else 0
    elif encoding in ("GLOBAL", "FLAT", "SCRATCH"):
        letter = VGPR + (VGPR if acc & 1 else 0)
        saddr = _field(inst, "saddr")
        has_saddr = encoding != "FLAT" and saddr not in (124, 125, 127)
        if has_saddr:
            operands["saddr"] = Operand(
                reg=saddr, count=1 if encoding == "SCRATCH" else 2, bits=32 if encoding == "SCRATCH" else 64
            )
        if encoding == "SCRATCH":
            wanted = 1 if _field(inst, "sve") else 0
        else:
            wanted = 1 if has_saddr else 2
        if wanted:
            operands["vaddr"] = Operand(reg=_field(inst, "addr") + VGPR, count=wanted, bits=32 * wanted)
        if "data" in widths and ("store" in mnemonic or "atomic" in mnemonic):
            count, bits = size_of("data")
            operands["data0"] = Operand(reg=_field(inst, "data") + letter, count=count, bits=bits)
        if "vdst" in widths and ("load" in mnemonic or mods["sc0"] and "atomic" in mnemonic) and "lds" not in mnemonic:
            count, bits = size_of("vdst")
            operands["vdst"] = Operand(reg=_field(inst, "vdst") + letter, count=count, bits=bits)
        top = 12 if encoding != "FLAT" else 11
        if encoding != "FLAT" and mods["offset"] >> top & 1:
            mods["offset"] -= 1 << (top + 1)
    size = inst.size()
    suffix = ""
    if name.endswith(("_E32", "_E64")):
        suffix = name[-4:].lower()
    return Instruction(index, address, size, bytes(data[:size]), mnemonic, encoding, variant, operands, mods, suffix)


def decode(code: bytes, address: int) -> list[Instruction]:
    """Decode `code`, which lies at byte `address` of the code object, from its first byte to its last.

    Raises:
        UnknownInstruction: at the first word that is no gfx950 instruction.
    """
    program: list[Instruction] = []
    offset = 0
    while offset < len(code):
        inst = decode_one(code[offset : offset + 16], len(program), address + offset)
        program.append(inst)
        offset += inst.size
    return program
