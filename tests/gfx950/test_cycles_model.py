"""The cycle model on programs whose time can be worked out by hand, and against published figures."""

from __future__ import annotations

import statistics

import aiter
import pytest

pytest.importorskip("triton")
from harness import assemble, source  # noqa: E402
from zyfa_kernels.emulator import CodeObject  # noqa: E402
from zyfa_kernels.emulator.cycles import Parameters, model  # noqa: E402
from zyfa_kernels.emulator.cycles.costs import CostTable  # noqa: E402
from zyfa_kernels.emulator.cycles.mainloop import _limiter  # noqa: E402
from zyfa_kernels.emulator.cycles.params import SOURCES  # noqa: E402
from zyfa_kernels.emulator.cycles.simulate import simulate  # noqa: E402

MFMA = "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], v[0:15]\n"
P = Parameters(mfma_issue=4, lds_latency=64, barrier=16, branch_taken=16)


def program(text: str):
    return CodeObject.load(assemble(source(text + "s_endpgm", lds=1024))).kernel().program


def run(text: str, waves: int = 1, params: Parameters = P):
    """Simulate straight-line code on `waves` waves; returns the trace without the final s_endpgm's slot."""
    code = program(text)
    return simulate(code, [list(range(len(code)))] * waves, CostTable(params), params, lambda i, after: False)


def last_issue(trace, wave: int = 0) -> int:
    return trace.issued[wave][-1]


def test_matrix_instructions_follow_their_passes():
    # Four 16-pass products: the last issues at 3 · 64; the end follows a slot later.
    assert run(MFMA * 4).issued[0][:4] == [0, 64, 128, 192]
    bf16 = "v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[24:27], v[0:15]\n"
    assert run(bf16 * 3).issued[0][:3] == [0, 32, 64]
    fp4 = "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:19], v[24:27], v[0:15] cbsz:4 blgp:4\n"
    assert run(fp4 * 3).issued[0][:3] == [0, 32, 64]


def test_vector_rates():
    assert last_issue(run("v_add_f32_e32 v0, v1, v2\n" * 10)) == 40
    assert (
        last_issue(run("v_exp_f32_e32 v0, v1\n" * 10)) == 76
    )  # the end needs no vector pipe: it follows the last issue
    assert last_issue(run("v_mul_lo_u32 v0, v1, v2\n" * 4)) == 3 * 16 + 4
    # Two waves share the pipe.
    assert max(last_issue(run("v_exp_f32_e32 v0, v1\n" * 10, waves=2), w) for w in (0, 1)) == 19 * 8 + 4


def test_vector_work_runs_beside_a_product_but_packed_fp32_waits():
    assert run(MFMA + "v_add_f32_e32 v100, v101, v102\n" * 3).issued[0][:4] == [0, 4, 8, 12]
    packed = "v_pk_mul_f32 v[100:101], v[102:103], v[104:105]\n"
    assert run(MFMA + packed).issued[0][1] == 64
    beside = Parameters(mfma_issue=4, packed_fp32_beside_mfma=True)
    assert run(MFMA + packed, params=beside).issued[0][1] == 4
    # The issue of a product blocks vector work for mfma_issue cycles.
    assert run(MFMA + "v_add_f32_e32 v100, v101, v102\n", params=Parameters(mfma_issue=16)).issued[0][1] == 16


def test_waits_for_lds():
    trace = run("ds_read_b128 v[0:3], v4\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v5, v0\n")
    # 1024 bytes from each of four SIMDs at 128 a cycle, then the latency; the wait itself takes a slot.
    assert trace.issued[0][1] == 4 * 1024 // 128 + 64 and trace.issued[0][2] == trace.issued[0][1] + 4
    assert [reason for _, _, _, reason in trace.stalls] == ["lgkmcnt"]


def test_nops_and_barrier():
    assert run("s_nop 7\ns_nop 0\n").issued[0] == [0, 32, 36]
    code = program("v_exp_f32_e32 v0, v1\nv_exp_f32_e32 v0, v1\nv_exp_f32_e32 v0, v1\ns_barrier\ns_barrier\n")
    slow, fast = list(range(6)), [3, 4, 5]
    trace = simulate(code, [slow, fast], CostTable(P), P, lambda i, after: False)
    first = trace.barriers[0]
    assert first.last == 0 and first.arrivals == {0: 20, 1: 0} and first.waited == 20
    assert trace.issued[1][0] == first.release == 20 + P.barrier


def test_every_parameter_has_a_source():
    assert {name for name, _, _ in Parameters().table()} == set(SOURCES)
    assert all(text for _, _, text in Parameters().table())


LOOP = """
v_lshlrev_b32_e32 v40, 4, v0
v_mov_b64_e32 v[42:43], 0
v_mov_b64_e32 v[44:45], 0
ds_write_b128 v40, v[42:45]
s_mov_b32 s5, 0
s_waitcnt lgkmcnt(0)
s_barrier
.Lloop:
ds_read_b128 v[16:19], v40
ds_read_b128 v[20:23], v40
s_waitcnt lgkmcnt(0)
{products}
{vector}
s_barrier
s_add_u32 s5, s5, 1
s_cmp_lt_u32 s5, s2
s_cbranch_scc1 .Lloop
s_endpgm
"""


def loop(products: int, vector: int) -> CodeObject:
    """A loop of so many fp8 products of v[16:31] and so many vector instructions that nothing depends on."""
    text = LOOP.format(products=MFMA * products, vector="v_add_f32_e32 v50, v51, v52\n" * vector)
    return CodeObject.load(
        assemble(
            source(text.removesuffix("s_endpgm\n") + "s_endpgm", lds=8192).replace(
                ".max_flat_workgroup_size: 1024", ".max_flat_workgroup_size: 512"
            )
        )
    )


def test_matrix_bound_loop():
    report = model(loop(32, 10), parameters=P)
    # 32 products of 64·32·32: two blocks of 32 queries × 128 keys at D = 128.
    assert report.blocks_per_iteration == 2 and report.matrix_cycles_per_block == 1024
    # Two waves: 2048 matrix cycles a block each, and one LDS round trip an iteration in which neither has operands.
    assert 2048 <= report.cycles_per_block < 2048 * 1.07
    assert report.matrix_busy == pytest.approx(2048 / report.cycles_per_block, rel=0.01)
    assert report.predicted_fraction_of_peak == pytest.approx(report.matrix_busy, rel=0.01)
    assert report.limiter == "matrix pipe" and report.barriers[0]["visits"] > 3
    assert report.vector_cycles_per_score == pytest.approx(40 / 2 / 64)


def test_vector_bound_loop():
    report = model(loop(1, 700), parameters=P)
    iteration = report.cycles_per_block / 16
    assert 2 * 700 * 4 <= iteration < 2 * 700 * 4 * 1.1
    assert report.vector_busy > 0.9 and report.limiter == "vector pipe"
    assert report.as_dict()["modelled"] is True


@pytest.mark.parametrize(
    ("busiest", "stalls", "says"),
    [
        ("vector pipe", {"vector pipe": 90.0, "barrier": 5.0, "lgkmcnt": 2.0}, "vector pipe (78% busy), then barrier"),
        ("vector pipe", {"barrier": 90.0, "vector pipe": 5.0}, "vector pipe (78% busy), then barrier"),
        ("vector pipe", {"vector pipe": 90.0}, "vector pipe (78% busy)"),
        ("LDS", {"lds port": 90.0, "vmcnt": 5.0}, "LDS (78% busy), then vmcnt"),
        ("vector pipe", {}, "vector pipe"),
    ],
)
def test_the_limiter_names_two_different_things(busiest, stalls, says):
    assert _limiter({"matrix pipe": 0.5, "vector pipe": 0.4, "LDS": 0.1, busiest: 0.78}, stalls) == says


def test_picture(tmp_path):
    report = model(loop(16, 100), parameters=P)
    for name in ("a.png", "a.svg"):
        report.picture(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5_000
    with pytest.raises(ValueError, match="png or .svg"):
        report.picture(tmp_path / "a.txt")


def test_no_main_loop():
    with pytest.raises(ValueError, match="no loop with matrix instructions"):
        model(CodeObject.load(assemble(source("s_endpgm"))))


@pytest.mark.slow
@pytest.mark.skipif(not aiter.ROOT, reason="ZYFA_AITER_HSA is not set")
def test_one_factor_explains_published_throughput():
    from zyfa_kernels.emulator.cycles.published import compare

    rows = compare(aiter.ROOT)
    factors = [row["factor"] for row in rows]
    assert len(rows) >= 6
    assert statistics.pstdev(factors) < 0.04 * statistics.mean(factors)
    by_name = {row["name"]: row for row in rows}
    # v4 over v3, published 1.50.
    assert 1.35 < by_name["v4 fp8"]["modelled_tflops"] / by_name["v3 fp8 causal, 32K"]["modelled_tflops"] < 1.65
