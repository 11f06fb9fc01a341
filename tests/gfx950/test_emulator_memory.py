"""Loads, stores, LDS and its transposing reads, and every fault that the emulator must name."""

from __future__ import annotations

import struct

import numpy as np
import pytest

pytest.importorskip("triton")
from harness import assemble, run_snippet, source  # noqa: E402
from zyfa_kernels.emulator import CodeObject, CodeObjectError, Emulator, EmulatorError, UnknownInstruction  # noqa: E402

RNG = np.random.default_rng(14)
DATA = RNG.integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32)
LANES = np.arange(64)


def launch(body: str, *arrays: np.ndarray, out: int = 4096, lds: int = 0, block: int = 64, grid=(1, 1, 1), **options):
    """Kernel arguments: the addresses of `arrays`, then of an output of `out` dwords; returns the output as uint32."""
    kernarg = 8 * (len(arrays) + 1)
    code = CodeObject.load(assemble(source(body + "\ns_endpgm", lds=lds, kernarg=kernarg)))
    emulator = Emulator(code, **options)
    pointers = [emulator.memory.upload(a) for a in arrays]
    target = emulator.memory.alloc(4 * out)
    emulator.launch("kernel", grid, block, struct.pack(f"<{len(arrays) + 1}Q", *pointers, target))
    return emulator.memory.download(target, np.uint32, (out,))


LOAD_ARGS = "s_load_dwordx4 s[4:7], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n"
BUFFER = LOAD_ARGS + "s_mov_b32 s10, {size}\ns_mov_b32 s11, 0x20000\ns_mov_b32 s8, s4\ns_and_b32 s9, s5, 0xffff\n"


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("ubyte", 1),
        ("sbyte", 1),
        ("ushort", 2),
        ("sshort", 2),
        ("dword", 4),
        ("dwordx2", 8),
        ("dwordx3", 12),
        ("dwordx4", 16),
    ],
)
@pytest.mark.parametrize("space", ["global", "buffer"])
def test_loads(space, kind, size):
    step = max(size, 4)
    words = max(1, size // 4)
    last = 11 + words
    target = f"v[12:{last}]" if words > 1 else "v12"
    access = (
        f"global_load_{kind} {target}, v1, s[4:5] offset:8"
        if space == "global"
        else f"buffer_load_{kind} {target}, v1, s[8:11], 0 offen offset:8"
    )
    store = "".join(f"global_store_dword v2, v{12 + w}, s[6:7] offset:{4 * w}\n" for w in range(words))
    got = launch(
        BUFFER.format(size=16384) + f"v_mul_u32_u24_e32 v1, {step}, v0\nv_lshlrev_b32_e32 v2, 4, v0\n{access}\n"
        f"s_waitcnt vmcnt(0)\n{store}",
        DATA,
        delayed_memory=True,
    ).reshape(-1, 4)
    raw = DATA.tobytes()
    for lane in range(64):
        at = 8 + step * lane
        if size < 4:
            want = [int.from_bytes(raw[at : at + size], "little", signed=kind.startswith("s")) & 0xFFFFFFFF]
        else:
            want = [int.from_bytes(raw[at + 4 * w : at + 4 * w + 4], "little") for w in range(words)]
        assert got[lane, :words].tolist() == want


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads(count):
    suffix = f"x{count}" if count > 1 else ""
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    moves = "".join(
        f"v_mov_b32_e32 v2, s{16 + k}\nglobal_store_dword v1, v2, s[6:7] offset:{4 * k}\n" for k in range(count)
    )
    got = launch(
        LOAD_ARGS + f"s_load_dword{suffix} {target}, s[4:5], 0x14\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v1, 0\n" + moves,
        DATA,
        delayed_memory=True,
    )
    assert got[:count].tolist() == DATA[5 : 5 + count].tolist()


def test_buffer_bounds():
    # 100 bytes: lane 6 reads dwords 24 … 27 of which only 24 lies inside; later lanes read zeros and store nothing.
    got = launch(
        BUFFER.format(size=100) + "v_lshlrev_b32_e32 v1, 4, v0\nbuffer_load_dwordx4 v[12:15], v1, s[8:11], 0 offen\n"
        "s_waitcnt vmcnt(0)\ns_mov_b32 s8, s6\ns_and_b32 s9, s7, 0xffff\nv_or_b32_e32 v12, 1, v12\n"
        "buffer_store_dwordx4 v[12:15], v1, s[8:11], 0 offen",
        DATA,
    ).reshape(-1, 4)
    assert got[5].tolist() == [DATA[20] | 1, *DATA[21:24]]
    assert got[6].tolist() == [DATA[24] | 1] + [0xFFFFFFFF] * 3
    assert (got[7:64] == 0xFFFFFFFF).all()


def test_buffer_store_of_one_register():
    """Lane l of the active ones stores at offset:8 + 4 (63 - l), and only inside of the 128 bytes."""
    got = launch(
        BUFFER.format(size=16384) + "v_lshlrev_b32_e32 v1, 2, v0\nbuffer_load_dword v12, v1, s[8:11], 0 offen\n"
        "s_waitcnt vmcnt(0)\nv_sub_u32_e32 v2, 252, v1\ns_mov_b32 s8, s6\ns_and_b32 s9, s7, 0xffff\n"
        "s_movk_i32 s10, 128\ns_mov_b32 exec_lo, 0xffff0000\nv_mov_b32_e32 v13, 7\n"
        "buffer_store_dword v12, v2, s[8:11], 0 offen offset:8\ns_mov_b64 exec, 1\n"
        "buffer_store_dword v12, v1, s[8:11], 0 offen",
        DATA,
    )
    want = {0: DATA[0]} | {2 + 63 - lane: DATA[lane] for lane in range(16, 64) if 2 + 63 - lane < 32}
    assert got[:64].tolist() == [want.get(n, 0xFFFFFFFF) for n in range(64)]


def test_buffer_scalar_offset_counts_for_the_bound():
    got = launch(
        BUFFER.format(size=128) + "s_movk_i32 s12, 64\nv_lshlrev_b32_e32 v1, 2, v0\n"
        "buffer_load_dword v12, v1, s[8:11], s12 offen\ns_waitcnt vmcnt(0)\nglobal_store_dword v1, v12, s[6:7]",
        DATA,
    )
    assert got[:64].tolist() == DATA[16:32].tolist() + [0] * 48


@pytest.mark.parametrize("delayed", [False, True])
def test_load_straight_to_lds(delayed):
    # LDS address = M0 + instruction offset + 16 · lane; the instruction offset also moves the source.
    got = launch(
        BUFFER.format(size=16384) + "v_sub_u32_e32 v1, 63, v0\nv_lshlrev_b32_e32 v1, 4, v1\ns_mov_b32 m0, 0x100\n"
        "buffer_load_dwordx4 v1, s[8:11], 0 offen offset:32 lds\ns_waitcnt vmcnt(0)\ns_barrier\n"
        "v_lshlrev_b32_e32 v2, 4, v0\nds_read_b128 v[12:15], v2 offset:288\ns_waitcnt lgkmcnt(0)\n"
        "global_store_dwordx4 v2, v[12:15], s[6:7]",
        DATA,
        lds=2048,
        delayed_memory=delayed,
    ).reshape(-1, 4)
    for lane in range(64):
        assert got[lane].tolist() == DATA[8 + 4 * (63 - lane) : 12 + 4 * (63 - lane)].tolist()


def test_global_load_to_lds():
    got = launch(
        LOAD_ARGS + "v_lshlrev_b32_e32 v1, 4, v0\ns_mov_b32 m0, 0\nglobal_load_lds_dwordx4 v1, s[4:5]\n"
        "s_waitcnt vmcnt(0)\nds_read_b128 v[12:15], v1\ns_waitcnt lgkmcnt(0)\n"
        "global_store_dwordx4 v1, v[12:15], s[6:7]",
        DATA,
        lds=1024,
        delayed_memory=True,
    )
    np.testing.assert_array_equal(got[:256], DATA[:256])


def lds_kernel(load: str, words: int, fill: int = 16) -> str:
    """Fill LDS with the first 64 · `fill` bytes of DATA, run `load` (address in v3, data to v12…), store `words`."""
    code = LOAD_ARGS + "v_lshlrev_b32_e32 v1, 4, v0\nglobal_load_dwordx4 v[4:7], v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
    code += "ds_write_b128 v1, v[4:7]\ns_waitcnt lgkmcnt(0)\ns_barrier\nv_lshlrev_b32_e32 v3, 3, v0\n" + load
    code += "\ns_waitcnt lgkmcnt(0)\nv_lshlrev_b32_e32 v2, 4, v0\n"
    return code + "".join(f"global_store_dword v2, v{12 + w}, s[6:7] offset:{4 * w}\n" for w in range(words))


@pytest.mark.parametrize(
    ("load", "words", "formula"),
    [
        ("ds_read_b64 v[12:13], v3", 2, lambda i: [2 * i, 2 * i + 1]),
        ("ds_read_b32 v12, v3 offset:12", 1, lambda i: [2 * i + 3]),
        ("ds_read2_b32 v[12:13], v3 offset0:1 offset1:6", 2, lambda i: [2 * i + 1, 2 * i + 6]),
        ("ds_read2st64_b32 v[12:13], v0 offset1:1", 2, None),
        ("v_lshlrev_b32_e32 v3, 4, v0\nds_read_b128 v[12:15], v3", 4, lambda i: [4 * i + k for k in range(4)]),
        ("v_lshlrev_b32_e32 v3, 4, v0\nds_read_b96 v[12:14], v3", 3, lambda i: [4 * i + k for k in range(3)]),
    ],
)
def test_lds_reads(load, words, formula):
    if formula is None:
        load = "v_lshlrev_b32_e32 v0, 2, v0\n" + load + "\nv_lshrrev_b32_e32 v0, 2, v0"

        def formula(i):
            return [i, i + 64]

    got = launch(lds_kernel(load, words), DATA, lds=1024, delayed_memory=True).reshape(-1, 4)
    for lane in range(64):
        assert got[lane, :words].tolist() == [int(DATA[k]) for k in formula(lane) if k < 256]


@pytest.mark.parametrize(
    ("load", "size", "signed"),
    [("ds_read_u8", 1, False), ("ds_read_i8", 1, True), ("ds_read_u16", 2, False), ("ds_read_i16", 2, True)],
)
def test_lds_narrow_reads(load, size, signed):
    got = launch(lds_kernel(f"{load} v12, v3 offset:{size}", 1), DATA, lds=1024).reshape(-1, 4)
    raw = DATA.tobytes()
    for lane in range(64):
        at = 8 * lane + size
        assert got[lane, 0] == int.from_bytes(raw[at : at + size], "little", signed=signed) & 0xFFFFFFFF


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_transposing_read(bits):
    # Within 16 lanes, element k of lane l is element 16·k + l of the group's 128 bytes, taken lane after lane.
    got = launch(lds_kernel(f"ds_read_b64_tr_b{bits} v[12:13], v3", 2), DATA, lds=1024, delayed_memory=True).reshape(
        -1, 4
    )
    count, per_lane = 1024 // bits, 64 // bits
    for group in range(4):
        block = int.from_bytes(DATA.tobytes()[128 * group : 128 * group + 128], "little")
        flat = [block >> bits * i & (1 << bits) - 1 for i in range(count)]
        for lane in range(16):
            want = sum(flat[16 * k + lane] << bits * k for k in range(per_lane))
            row = got[16 * group + lane]
            assert int(row[0]) | int(row[1]) << 32 == want


def test_transposing_read_of_6_bits():
    load = "v_mul_u32_u24_e32 v3, 16, v0\nds_read_b96_tr_b6 v[12:14], v3"
    got = launch(lds_kernel(load, 3), DATA, lds=1024).reshape(-1, 4)
    for group in range(4):
        flat = []
        for lane in range(16):
            word = int.from_bytes(DATA.tobytes()[16 * (16 * group + lane) :][:12], "little")
            flat += [word >> 6 * i & 63 for i in range(16)]
        for lane in range(16):
            row = got[16 * group + lane]
            assert sum(int(row[k]) << 32 * k for k in range(3)) == sum(flat[16 * k + lane] << 6 * k for k in range(16))


def test_lds_writes():
    body = LOAD_ARGS + (
        "v_lshlrev_b32_e32 v1, 4, v0\nglobal_load_dwordx4 v[4:7], v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
        "v_mov_b32_e32 v8, 0\nv_mov_b32_e32 v9, 0\nds_write_b64 v1, v[8:9]\nds_write_b64 v1, v[8:9] offset:8\n"
        "ds_write_b8 v1, v4 offset:1\nds_write_b16 v1, v5 offset:6\nds_write_b8_d16_hi v1, v6 offset:8\n"
        "ds_write_b16_d16_hi v1, v7 offset:12\ns_waitcnt lgkmcnt(0)\nds_read_b128 v[12:15], v1\n"
        "s_waitcnt lgkmcnt(0)\nglobal_store_dwordx4 v1, v[12:15], s[6:7]"
    )
    got = launch(body, DATA, lds=1024).reshape(-1, 4)
    for lane in range(64):
        a, b, c, d = (int(x) for x in DATA[4 * lane : 4 * lane + 4])
        assert got[lane].tolist() == [(a & 255) << 8, (b & 0xFFFF) << 16, c >> 16 & 255, d >> 16]


def test_write2_and_cross_lane():
    body = LOAD_ARGS + (
        "v_lshlrev_b32_e32 v1, 2, v0\nglobal_load_dword v4, v1, s[4:5]\nglobal_load_dword v5, v1, s[4:5] offset:256\n"
        "s_waitcnt vmcnt(0)\nv_lshlrev_b32_e32 v2, 3, v0\nds_write2_b32 v2, v4, v5 offset0:1 offset1:0\n"
        "s_waitcnt lgkmcnt(0)\nds_read_b64 v[12:13], v2\nv_xor_b32_e32 v3, 20, v1\nds_bpermute_b32 v14, v3, v4\n"
        "ds_permute_b32 v15, v3, v4\nds_swizzle_b32 v16, v4 offset:swizzle(SWAP,4)\ns_waitcnt lgkmcnt(0)\n"
        "v_lshlrev_b32_e32 v2, 4, v0\nglobal_store_dwordx4 v2, v[12:15], s[6:7]\n"
        "global_store_dword v1, v16, s[6:7] offset:1024"
    )
    got = launch(body, DATA, lds=1024, delayed_memory=True)
    table = got[:256].reshape(64, 4)
    for lane in range(64):
        swapped = DATA[lane ^ 5]
        assert table[lane].tolist() == [DATA[64 + lane], DATA[lane], swapped, swapped]
        assert got[256 + lane] == DATA[lane ^ 4]


def fault(kind: str, *parts: str):
    """Expect an EmulatorError of `kind` whose text holds all of `parts`."""

    class Check:
        def __enter__(self):
            return self

        def __exit__(self, type_, error, trace):
            assert type_ is not None, f"no {kind} raised"
            assert issubclass(type_, EmulatorError), repr(error)
            assert error.kind == kind, str(error)
            for part in parts:
                assert part in str(error), str(error)
            assert error.address is not None and error.instruction and error.wave is not None
            return True

    return Check()


def test_faults_name_what_and_where():
    with fault("undefined-register", "v9", "v_add_f32_e32 v2, v9, v1", "wave 0", "lane 0"):
        run_snippet("v_mov_b32_e32 v1, 0\nv_add_f32_e32 v2, v9, v1")
    with fault("undefined-register", "v9", "lane 8"):
        run_snippet("s_mov_b64 exec, 0xff\nv_mov_b32_e32 v9, 0\ns_mov_b64 exec, -1\nv_mov_b32_e32 v2, v9")
    with fault("undefined-register", "s40"):
        run_snippet("s_add_u32 s41, s40, 1")
    with fault("undefined-register", "vcc"):
        run_snippet("v_cndmask_b32_e32 v2, v0, v0, vcc")
    with fault("undefined-lds", "0x10", "lane 2"):
        run_snippet(
            "v_lshlrev_b32_e32 v1, 3, v0\ns_mov_b64 exec, 3\nds_write_b64 v1, v[0:1]\ns_mov_b64 exec, -1\n"
            "s_waitcnt lgkmcnt(0)\nds_read_b64 v[2:3], v1",
            lds=1024,
        )
    with fault("lds-range", "lane 32"):
        run_snippet("v_lshlrev_b32_e32 v1, 4, v0\nds_write_b32 v1, v0", lds=512)
    with fault("alignment", "lane 1"):
        run_snippet(
            "v_lshlrev_b32_e32 v1, 3, v0\nv_mov_b64_e32 v[2:3], 0\nv_mov_b64_e32 v[4:5], 0\nds_write_b128 v1, v[2:5]",
            lds=2048,
        )
    with fault("alignment", "lane 1"):
        run_snippet("v_lshlrev_b32_e32 v1, 1, v0\nglobal_load_dword v2, v1, s[6:7]")
    with fault("global-range", "lane 0"):
        run_snippet("v_mov_b32_e32 v1, 0x1000\nglobal_load_dword v2, v1, s[6:7]")
    with fault("global-range", "s_load_dword"):
        run_snippet("s_mov_b64 s[8:9], 0\ns_load_dword s10, s[8:9], 0x0")


def test_register_budget():
    with pytest.raises(UnknownInstruction, match="v64 lies outside of the 64 VGPRs"):
        code = CodeObject.load(assemble(source("v_mov_b32_e32 v64, 0\ns_endpgm", vgprs=64, accum_offset=64)))
        Emulator(code).launch("kernel", (1, 1, 1), 64, bytes(16))


def test_delayed_memory_finds_missing_waits():
    load = "v_lshlrev_b32_e32 v1, 2, v0\nglobal_load_dword v2, v1, s[6:7]\n"
    run_snippet(load + "s_waitcnt vmcnt(0)\nv_mov_b32_e32 v3, v2", emulator_options={"delayed_memory": True})
    with fault("read-before-wait", "v2", "global_load_dword v2, v1, s[6:7]"):
        run_snippet(load + "v_mov_b32_e32 v3, v2", emulator_options={"delayed_memory": True})
    with fault("write-under-load", "v2"):
        run_snippet(load + "v_mov_b32_e32 v2, 0", emulator_options={"delayed_memory": True})
    with fault("read-before-wait", "s10"):
        run_snippet("s_load_dword s10, s[0:1], 0x0\ns_mov_b32 s11, s10", emulator_options={"delayed_memory": True})
    # In-order return: vmcnt(1) covers the first of two loads, not the second.
    two = load + "global_load_dword v4, v1, s[6:7]\ns_waitcnt vmcnt(1)\n"
    run_snippet(two + "v_mov_b32_e32 v3, v2", emulator_options={"delayed_memory": True})
    with fault("read-before-wait", "v4"):
        run_snippet(two + "v_mov_b32_e32 v3, v4", emulator_options={"delayed_memory": True})
    # A scalar load may return before an older LDS read: lgkmcnt(1) then promises nothing.
    mixed = "v_lshlrev_b32_e32 v1, 2, v0\nds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nds_read_b32 v2, v1\n"
    mixed += "s_load_dword s10, s[0:1], 0x0\n"
    with fault("read-before-wait", "v2"):
        run_snippet(
            mixed + "s_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v3, v2", lds=256, emulator_options={"delayed_memory": True}
        )
    run_snippet(
        mixed + "s_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v3, v2\ns_mov_b32 s11, s10",
        lds=256,
        emulator_options={"delayed_memory": True},
    )


TWO_WAVES = (
    LOAD_ARGS + "s_mov_b32 s8, s4\ns_and_b32 s9, s5, 0xffff\ns_movk_i32 s10, 0x2000\ns_mov_b32 s11, 0x20000\n"
    "v_readfirstlane_b32 s14, v0\ns_lshr_b32 s14, s14, 6\ns_lshl_b32 s15, s14, 10\ns_mov_b32 m0, s15\n"
    "v_lshlrev_b32_e32 v1, 4, v0\nbuffer_load_dwordx4 v1, s[8:11], 0 offen lds\n{wait}\n{barrier}\n"
    "v_xor_b32_e32 v2, 0x400, v1\nds_read_b128 v[4:7], v2\ns_waitcnt lgkmcnt(0)\n"
    "global_store_dwordx4 v1, v[4:7], s[6:7]\n"
)


def test_lds_between_waves_needs_wait_and_barrier():
    good = {"wait": "s_waitcnt vmcnt(0)", "barrier": "s_barrier"}
    got = launch(TWO_WAVES.format(**good), DATA, lds=2048, block=128, delayed_memory=True)
    np.testing.assert_array_equal(got[:512], np.concatenate([DATA[256:512], DATA[:256]]))
    with fault("lds-before-wait", "wave 0"):
        launch(TWO_WAVES.format(**good | {"wait": ""}), DATA, lds=2048, block=128, delayed_memory=True)
    with fault("lds-race", "wave 1 wrote"):
        launch(TWO_WAVES.format(**good | {"barrier": ""}), DATA, lds=2048, block=128, delayed_memory=True)
    # Writing over what another wave still reads needs a barrier as well.
    again = "s_barrier\nds_write_b128 v1, v[4:7]\ns_waitcnt lgkmcnt(0)\n"
    launch(TWO_WAVES.format(**good) + again, DATA, lds=2048, block=128, delayed_memory=True)
    with fault("lds-overwrite", "wave 1 read"):
        launch(
            TWO_WAVES.format(**good) + again.removeprefix("s_barrier\n"), DATA, lds=2048, block=128, delayed_memory=True
        )


def test_hazards_can_be_collected():
    body = TWO_WAVES.format(wait="s_waitcnt vmcnt(0)", barrier="")
    code = CodeObject.load(assemble(source(body + "s_endpgm", lds=2048)))
    emulator = Emulator(code, delayed_memory=True, collect_hazards=True)
    pointers = emulator.memory.upload(DATA), emulator.memory.alloc(4096)
    emulator.launch("kernel", (1, 1, 1), 128, struct.pack("<QQ", *pointers))
    assert [h.kind for h in emulator.hazards] == ["lds-race"]


def test_barrier_that_not_all_waves_reach():
    with fault("barrier", "1 of 2 waves wait here", "s_barrier", "wave 1"):
        launch(
            LOAD_ARGS
            + "v_readfirstlane_b32 s14, v0\ns_cmp_lt_u32 s14, 64\ns_cbranch_scc1 .Ldone\ns_barrier\n.Ldone:\n",
            DATA,
            block=128,
        )


def test_endless_loop_is_given_up():
    with fault("endless"):
        launch(".Lloop:\ns_branch .Lloop\n", DATA, max_instructions=10_000)


def test_bad_launches():
    code = CodeObject.load(assemble(source("s_endpgm")))
    emulator = Emulator(code)
    for arguments, message in [
        (("kernel", (1, 1, 1), 100, bytes(16)), "block of 100 threads"),
        (("kernel", (0, 1, 1), 64, bytes(16)), "grid is"),
        (("kernel", (1, 1, 1), 64, bytes(8)), "takes 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            emulator.launch(*arguments)
    with pytest.raises(CodeObjectError, match="no kernel 'other'; the code object has: kernel"):
        emulator.launch("other", (1, 1, 1), 64, bytes(16))
    with pytest.raises(CodeObjectError, match="not an ELF"):
        CodeObject.load(b"nonsense")
    with pytest.raises(ValueError, match="not all allocated"):
        emulator.memory.download(emulator.memory.alloc(16), np.uint32, (8,))
