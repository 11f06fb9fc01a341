"""One line of a good kernel removed or changed: each check reports it, at the instruction that then comes too early."""

from __future__ import annotations

import re
from functools import cache

import pytest
from zyfa_kernels.emulator import CodeObject
from zyfa_kernels.emulator.checks import Report, check
from zyfa_kernels.runtime.registry import kernel, names
from zyfa_kernels.runtime.toolchain import assemble

from zyfa_backend.kernel_run import delayed_run

TILE_BYTES, STAGES = 16384, 4
every_kernel = pytest.mark.parametrize("name", names())


@cache
def lines(name: str) -> tuple[str, ...]:
    return tuple(kernel(name).text().split("\n"))


def code(text: str) -> str:
    """The instruction of a line, without its comment."""
    return text.split("//")[0].strip()


def is_instruction(text: str) -> bool:
    return text.startswith("    ") and bool(code(text)) and code(text)[0] not in ".-"


def removed(name: str, number: int) -> CodeObject:
    text = lines(name)
    return CodeObject.load(assemble("\n".join([*text[:number], *text[number + 1 :]])))


def phase(name: str, number: int) -> str:
    """Title of the phase that a line belongs to."""
    text = lines(name)
    at = next(n for n in range(number, 0, -1) if text[n - 1].startswith("// ="))
    return text[at].removeprefix("// ")


def following(name: str, number: int) -> int:
    """Index, among the instructions of the program, of the one behind a line that is removed."""
    start = next(n for n, text in enumerate(lines(name)) if text.startswith("zyfa_") and text.endswith(":"))
    return sum(is_instruction(text) for text in lines(name)[start:number])


def representatives(name: str, mnemonic: str) -> dict[str, int]:
    """One line of each kind: what stands behind it (no matter which registers), in set-up, tile loop or output."""
    found: dict[str, int] = {}
    for number, text in enumerate(lines(name)):
        if code(text).startswith(mnemonic) and "vmcnt" not in text:
            after = next(code(t) for t in lines(name)[number + 1 :] if is_instruction(t))
            where = re.sub(r"Stage \d", "Stage", phase(name, number))
            found.setdefault(f"{where}: {after.split()[0]}", number)
    return found


def reported(code_object: CodeObject, report: Report, index: int) -> set[str]:
    """Rules of the findings at an instruction."""
    (only,) = code_object.kernels.values()
    address = only.program[index].address
    return {v.rule for v in (*report.violations, *report.advice) if v.address == address}


@every_kernel
def test_a_removed_nop(name):
    found = {}
    for where, number in representatives(name, "s_nop").items():
        mutated = removed(name, number)
        found[where] = reported(mutated, check(mutated, lds_runs=False), following(name, number))
    wanted = {
        "First tiles on their way: buffer_load_dwordx4": "m0",
        "Stage, matrix phase: buffer_load_dwordx4": "m0",
        "Stage, vector phase: v_permlane32_swap_b32": "valu-permlane",
        "Output of the last tile: v_fmac_f32": "mfma-result",
        "Output: v_cndmask_b32": "valu-sgpr-valu",
        "Output: v_fmac_f32": "trans",
        "Output: v_permlane32_swap_b32": "valu-permlane",
    }
    assert {where: rule for where, rule in wanted.items() if rule not in found.get(where, ())} == {}
    assert all(found.values()), found


@every_kernel
def test_a_removed_wait_for_lds_or_scalars(name):
    found = {}
    for where, number in representatives(name, "s_waitcnt").items():
        mutated = removed(name, number)
        found[where] = reported(mutated, check(mutated, lds_runs=False), following(name, number))
    # That one is not needed: reads into registers that older reads of the same counter fill land behind them.
    found.pop("Output of the last tile: ds_read_b64_tr_b8")
    assert len(found) == 8 and set.union(*found.values()) == {"wait"}
    assert all(found.values()), found


@every_kernel
def test_a_removed_wait_for_a_tile(name):
    """The static run finds it in the loop, at the first read of the tile that it waits for."""
    stage = names().index(name) % STAGES
    (number,) = (
        n
        for n, text in enumerate(lines(name))
        if "vmcnt" in code(text) and phase(name, n) == f"Stage {stage}, matrix phase"
    )
    report = check(removed(name, number))
    # Behind the barriers comes the next stage, which reads ahead the first K of the one after.
    offset = (stage + 2) % STAGES * TILE_BYTES
    early = {v.instruction.rpartition("offset:")[2] for v in report.violations if v.rule == "lds-wait"}
    assert early and all(("ds_read" in x and offset == 0) or x.isdigit() for x in early)
    assert any((x.isdigit() and int(x) == offset) or (not x.isdigit() and offset == 0) for x in early)
    assert {v.rule for v in report.violations} == {"lds-wait", "lds-barrier"}


@every_kernel
def test_a_removed_barrier(name):
    stage = names().index(name) % STAGES
    which = ("matrix", "vector")[stage % 2]
    (number,) = (
        n
        for n, text in enumerate(lines(name))
        if code(text) == "s_barrier" and phase(name, n) == f"Stage {stage}, {which} phase"
    )
    report = check(removed(name, number))
    assert report.violations and {v.rule for v in report.violations} <= {"lds-wait", "lds-barrier", "lds-overwrite"}
    assert all(v.instruction.startswith(("ds_read", "buffer_load")) for v in report.violations)


def places(name: str) -> dict[str, int]:
    """Barriers and waits for tiles of the parts that depend on arguments: start, first tile, end."""
    found: dict[str, int] = {}
    for number, text in enumerate(lines(name)):
        if code(text) == "s_barrier" or "vmcnt" in code(text):
            what = text.partition("// ")[2] or code(text).split()[0]
            found.setdefault(f"{phase(name, number)}: {what}", number)
    return found


@pytest.mark.parametrize(
    ("number", "where", "kinds"),
    [
        (0, "LDS addresses of the operand reads: s_barrier", {"lds-race"}),
        (1, "LDS addresses of the operand reads: waves 4-7 start one phase later", {"barrier"}),
        (2, "First tile, matrix phase: scores only: s_barrier", {"lds-race", "lds-before-wait", "lds-overwrite"}),
        (3, "First tile, vector phase: s_barrier", {"lds-race", "lds-before-wait", "lds-overwrite"}),
        (0, "Stage 3, matrix phase: K of the tile after the next and V of the next have landed", {"lds-before-wait"}),
        (1, "Output of the last tile: waves 0-3 end one phase earlier", {"barrier"}),
        (2, "Queries: s_waitcnt", {"read-before-wait"}),
    ],
)
def test_slow_memory_finds_what_depends_on_arguments(number, where, kinds):
    """Where addresses follow from arguments, the check runs the kernel with late loads."""
    name = names()[number]
    found = delayed_run(name, removed(name, places(name)[where]))
    assert found and kinds & {error.kind for error in found}
    if kinds == {"barrier"}:
        assert found[-1].instruction == "s_barrier"
    elif "lds-race" in kinds or "lds-before-wait" in kinds:
        assert any("ds_read" in error.instruction for error in found)


@every_kernel
def test_slow_memory_finds_nothing_in_a_good_kernel(name):
    assert delayed_run(name) == []


def changed(name: str, old: str, new: str) -> CodeObject:
    text = "\n".join(lines(name))
    assert len(re.findall(old, text)) == 1, old
    return CodeObject.load(assemble(re.sub(old, new, text)))


@every_kernel
def test_other_checks(name):
    made = kernel(name)

    def rules(old: str, new: str, **options) -> dict[str, str]:
        report = check(changed(name, old, new), lds_runs=False, **options)
        return {v.rule: v.instruction for v in report.violations}

    # The scale of V is never set.
    found = rules(r"    v_mov_b32 v\d+, 0x7f7f7f7f.*\n", "")
    assert set(found) == {"undefined-register"} and "v_mfma_scale" in found["undefined-register"]
    vgprs = rf"_vgpr {made.vgprs}\n(.*)\n    .amdhsa_accum_offset {made.vgprs}"
    assert set(rules(vgprs, r"_vgpr 200\n\1\n .amdhsa_accum_offset 200")) == {"register-budget"}
    assert set(rules(vgprs, r"_vgpr 264\n\1\n .amdhsa_accum_offset 256")) == {"occupancy"}
    lds = "_fixed_size {}\n    .amdhsa_kernarg"
    assert set(rules(lds.format(made.lds_bytes), lds.format(160 * 1024 + 16))) == {"lds-budget"}


@pytest.mark.parametrize(
    ("old", "new", "rule", "at"),
    [
        ("_segment_fixed_size 131072\n", "_segment_fixed_size 65536\n", "lds-range", "ds_read_b64_tr_b8"),
        (r"(ds_read_b128 v\[168:171\], v208 offset:)24576", r"\g<1>24584", "alignment", "ds_read_b128"),
    ],
)
def test_lds_accesses_out_of_range_or_misaligned(old, new, rule, at):
    name = names()[0]
    text = "\n".join(lines(name))
    report = check(CodeObject.load(assemble(re.sub(old, new, text, count=1))))
    found = [v for v in report.violations if v.rule == rule]
    assert found and all(at in v.instruction for v in found)


def test_bank_conflicts_without_the_swizzle():
    name = names()[0]
    without = changed(name, r"    v_xor_b32 (v\d+), \1, (v\d+)( *// swizzle of the row)", r"    v_mov_b32 \1, 0\3")
    report = check(without)
    worse = {a.instruction.split()[0] for a in report.lds_accesses if a.in_loop and a.cycles > a.ideal}
    assert report.bank_conflicts > 0 and worse == {"ds_read_b128"}
