"""Reads AMDGPU code objects: kernels by name, their descriptors and metadata, and their machine code."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from elftools.elf.segments import NoteSegment

from .decode import Instruction, decode
from .errors import CodeObjectError, UnknownInstruction

EM_AMDGPU = 224
MACHINES = {0x4F: "gfx950", 0x4C: "gfx942", 0x40: "gfx940", 0x3F: "gfx90a"}  # EF_AMDGPU_MACH, LLVM AMDGPUUsage
NT_AMDGPU_METADATA = 32
LARGEST_IMAGE = 1 << 30


@dataclass(frozen=True)
class KernelDescriptor:
    """The 64-byte `.kd` object, fields as in LLVM's AMDGPUUsage "Code Object Kernel Descriptor"."""

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry_offset: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    kernarg_preload: int

    @classmethod
    def parse(cls, data: bytes) -> KernelDescriptor:
        lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", data, 0)
        rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", data, 44)
        properties, preload = struct.unpack_from("<HH", data, 56)
        return cls(lds, scratch, kernarg, entry, rsrc1, rsrc2, rsrc3, properties, preload)

    @property
    def vgprs(self) -> int:
        """Vector registers a lane is given, AccVGPRs included (granule 8 on gfx90a and later)."""
        return ((self.rsrc1 & 0x3F) + 1) * 8

    @property
    def accum_offset(self) -> int:
        """First of those registers that is an AccVGPR."""
        return ((self.rsrc3 & 0x3F) + 1) * 4

    @property
    def float_mode(self) -> int:
        """Bits 12-19 of rsrc1: rounding of fp32 and fp16/64, then denormals of fp32 and fp16/64."""
        return self.rsrc1 >> 12 & 0xFF

    @property
    def user_sgprs(self) -> int:
        return self.rsrc2 >> 1 & 0x1F

    @property
    def workgroup_id_enabled(self) -> tuple[bool, bool, bool]:
        return bool(self.rsrc2 >> 7 & 1), bool(self.rsrc2 >> 8 & 1), bool(self.rsrc2 >> 9 & 1)

    @property
    def kernarg_sgpr(self) -> int | None:
        """SGPR that holds the low half of the kernel argument pointer, or None if the kernel asks for none."""
        if not self.properties >> 3 & 1:
            return None
        return (4 if self.properties & 1 else 0) + (2 if self.properties & 2 else 0) + (2 if self.properties & 4 else 0)

    @property
    def user_sgprs_before_preload(self) -> int:
        widths = (4, 2, 2, 2, 2, 2, 1)  # private buffer, dispatch, queue, kernarg, dispatch id, flat scratch, size
        return sum(w for bit, w in enumerate(widths) if self.properties >> bit & 1)


@dataclass
class Kernel:
    """One kernel of a code object.

    `entry` and `end` are byte addresses; `program` its instructions in address order; `metadata` its entry of
    `amdhsa.kernels` (empty if the object has none).
    """

    name: str
    descriptor: KernelDescriptor
    entry: int
    end: int
    metadata: dict
    program: list[Instruction] = field(repr=False, default_factory=list)

    @property
    def kernarg_bytes(self) -> int:
        """From the descriptor, or from the metadata where the descriptor says 0 (some assemblers leave it out)."""
        return self.descriptor.kernarg_bytes or int(self.metadata.get(".kernarg_segment_size", 0))

    @property
    def max_workgroup_size(self) -> int:
        return int(self.metadata.get(".max_flat_workgroup_size", 1024))


class CodeObject:
    """A loaded code object: `kernels` by name, the `image` of its loaded segments, and decoded `instructions`."""

    def __init__(
        self, kernels: dict[str, Kernel], image: bytes, target: str, path: str | None, symbols: dict[int, str]
    ):
        self.kernels, self.image, self.target, self.path, self.symbols = kernels, image, target, path, symbols

    @property
    def instructions(self) -> list[Instruction]:
        """All instructions of all kernels, in address order."""
        return [inst for kernel in sorted(self.kernels.values(), key=lambda k: k.entry) for inst in kernel.program]

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel `name`, or the only one."""
        if name is None:
            if len(self.kernels) == 1:
                return next(iter(self.kernels.values()))
            raise CodeObjectError(f"the code object has several kernels, name one of: {', '.join(self.kernels)}")
        if name not in self.kernels:
            raise CodeObjectError(f"no kernel {name!r}; the code object has: {', '.join(self.kernels)}")
        return self.kernels[name]

    @classmethod
    def load(cls, source: str | Path | bytes) -> CodeObject:
        """Read a code object from a path or from its bytes.

        Raises:
            CodeObjectError: not an ELF, not AMDGPU, another target than gfx950, or no kernel in it.
            UnknownInstruction: a kernel holds a word that is no gfx950 instruction.
        """
        path = None if isinstance(source, bytes) else str(source)
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        name = path or "the given bytes"
        if data[:4] != b"\x7fELF":
            raise CodeObjectError(f"{name}: not an ELF file (it starts with {data[:4]!r})")
        try:
            return cls._parse(data, name, path)
        except (CodeObjectError, UnknownInstruction):
            raise
        except Exception as error:  # the ELF and metadata parsers raise whatever a damaged field leads to
            text = " ".join(str(error).split()) or type(error).__name__
            raise CodeObjectError(f"{name}: a damaged or incomplete code object ({text})") from error

    @classmethod
    def _parse(cls, data: bytes, name: str, path: str | None) -> CodeObject:
        elf = ELFFile(io.BytesIO(data))
        machine = struct.unpack_from("<H", data, 18)[0]
        if machine != EM_AMDGPU:
            raise CodeObjectError(f"{name}: ELF machine {machine}, want {EM_AMDGPU} (AMDGPU)")
        target = MACHINES.get(elf["e_flags"] & 0xFF, f"unknown ({elf['e_flags'] & 0xFF:#x})")
        if target != "gfx950":
            raise CodeObjectError(f"{name}: built for {target}, want gfx950")
        image = _load_segments(elf)
        if not image:
            raise CodeObjectError(f"{name}: no loadable segment; link the object first")
        metadata = {k[".symbol"]: k for k in _metadata(elf).get("amdhsa.kernels", [])}
        table = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
        symbols = {s.name: s for s in table.iter_symbols() if s.name} if isinstance(table, SymbolTableSection) else {}
        text = [s for s in elf.iter_sections() if s["sh_flags"] & 4 and s["sh_type"] == "SHT_PROGBITS"]
        kernels: dict[str, Kernel] = {}
        for symbol in symbols.values():
            if not symbol.name.endswith(".kd"):
                continue
            kd = symbol["st_value"]
            descriptor = KernelDescriptor.parse(image[kd : kd + 64])
            entry = kd + descriptor.entry_offset
            function = symbols.get(symbol.name[:-3])
            section = next((s for s in text if s["sh_addr"] <= entry < s["sh_addr"] + s["sh_size"]), None)
            if section is None:
                raise CodeObjectError(f"{name}: the entry of {symbol.name} lies outside of the code, at {entry:#x}")
            end = section["sh_addr"] + section["sh_size"]
            if function is not None and function["st_size"]:
                end = entry + function["st_size"]
            else:
                later = [
                    image_kd
                    for image_kd in (s["st_value"] for s in symbols.values() if s["st_info"]["type"] == "STT_FUNC")
                    if image_kd > entry
                ]
                end = min([end, *later])
            kernels[symbol.name[:-3]] = Kernel(symbol.name[:-3], descriptor, entry, end, metadata.get(symbol.name, {}))
        if not kernels:
            raise CodeObjectError(f"{name}: holds no kernel (no symbol that ends in .kd)")
        for kernel in kernels.values():
            kernel.program = decode(image[kernel.entry : kernel.end], kernel.entry)
        labels = {s["st_value"]: s.name for s in symbols.values() if s["st_info"]["type"] in ("STT_NOTYPE", "STT_FUNC")}
        return cls(kernels, image, target, path, labels)


def _load_segments(elf: ELFFile) -> bytes:
    segments = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
    size = max((s["p_vaddr"] + s["p_memsz"] for s in segments), default=0)
    if size > LARGEST_IMAGE:
        raise CodeObjectError(f"segments reach up to {size:#x}, want at most {LARGEST_IMAGE:#x}")
    image = bytearray(size)
    for segment in segments:
        image[segment["p_vaddr"] : segment["p_vaddr"] + segment["p_filesz"]] = segment.data()
    return bytes(image)


def _metadata(elf: ELFFile) -> dict:
    for segment in elf.iter_segments():
        if not isinstance(segment, NoteSegment):
            continue
        for note in segment.iter_notes():
            if note["n_name"] == "AMDGPU" and note["n_type"] in (NT_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                return msgpack.unpackb(note["n_descdata"])
    return {}
