"""FP8 prefill on a GPU against FlashAttention-3 and cuDNN: every kernel in a CUDA graph, replayed in random order.

    PYTHONPATH=.:kernels python examples/bench_prefill.py --json examples/results/prefill_h200.json

Causal, Gaussian inputs, one sequence. TFLOP/s counts half of the square. ZYFA's time includes the transposition of V;
K and V come through a shuffled block table unless a name says otherwise. Peers that are not installed are left out:
FlashAttention-3 is vLLM's build (`--fa3` names its extension where vLLM itself is not installed), cuDNN needs
nvidia-cudnn-frontend. A ratio is the median of ratios within a round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from zyfa_kernels.triton.prefill import implementation, prefill

DEVICE = "cuda"
FP8 = torch.float8_e4m3fn
SHAPES = {"mha 32 x 128": (32, 32, 128), "gqa 32/8 x 128": (32, 8, 128), "mla 16 x 192/128": (16, 16, 192)}
LENGTHS = {
    "mha 32 x 128": (1024, 4096, 16384, 32768),
    "gqa 32/8 x 128": (4096, 16384),
    "mla 16 x 192/128": (4096, 16384),
}


class Problem:
    """One sequence of S tokens; `block` 0 packs the keys."""

    def __init__(self, s: int, hq: int, hkv: int, d: int, block: int, interleaved: bool = False) -> None:
        self.s, self.hq, self.hkv, self.d, self.dv, self.block = s, hq, hkv, d, min(d, 128), block
        normal = lambda *shape: torch.randn(*shape, device=DEVICE).to(FP8)  # noqa: E731
        self.q = normal(s, hq, d)
        if not block:
            self.k, self.v, self.table = normal(s, hkv, d), normal(s, hkv, self.dv), None
        elif interleaved:  # vLLM's cache: [blocks, heads, tokens, K and V]
            both = normal(s // block, hkv, block, d + self.dv).permute(0, 2, 1, 3)
            self.k, self.v = both[..., :d], both[..., d:]
        else:
            self.k, self.v = normal(s // block, block, hkv, d), normal(s // block, block, hkv, self.dv)
        if block:
            self.table = torch.randperm(s // block, device=DEVICE).to(torch.int32).view(1, -1)
        self.cu = torch.tensor([0, s], device=DEVICE, dtype=torch.int32)
        self.keys = self.cu[1:].clone()
        self.q_scale, self.scale = torch.ones(s, hq, device=DEVICE), torch.ones(hkv, device=DEVICE)
        self.out = torch.empty(s, hq, self.dv, device=DEVICE, dtype=torch.bfloat16)

    @property
    def flops(self) -> float:
        return self.s**2 * self.hq * (self.d + self.dv)

    def zyfa(self, p: str = "lean", int8: bool = False) -> Callable[[], Any]:
        q, k = self.q, self.k
        if int8:
            q, k = ((x.float() * 36).round().clamp(-127, 127).to(torch.int8) for x in (q, k))
        q_scale = self.q_scale / 36**2 if int8 else self.q_scale
        options = dict(seqlens_k=self.keys, block_table=self.table) if self.block else dict(cu_seqlens_k=self.cu)
        return lambda: prefill(
            q,
            q_scale,
            k,
            self.v,
            self.scale,
            self.scale,
            cu_seqlens_q=self.cu,
            max_seqlen_q=self.s,
            max_seqlen_k=self.s,
            softmax_scale=self.d**-0.5,
            p=p,
            qk_format="int8" if int8 else "fp8_e4m3",
            out=self.out,
            **options,
        )

    def fa3(self) -> Callable[[], Any]:
        one = torch.ones(1, self.hkv, device=DEVICE)
        out = torch.empty_like(self.out)
        keys = (None, None, None, self.keys) if self.block else (self.cu, None, None, None)
        arguments = (self.q, self.k, self.v, None, None, None, out, self.cu, *keys, self.s, self.s, self.table)
        arguments += (None,) * 5 + (one, one, one, self.d**-0.5, True, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0)
        return lambda: torch.ops._vllm_fa3_C.fwd(*arguments, None)

    def cudnn(self) -> Callable[[], Any]:
        import cudnn

        d, dv = self.d, self.dv
        normal = lambda h, n: torch.randn(1, h, self.s, n, device=DEVICE).to(FP8)  # noqa: E731
        q, k, v = normal(self.hq, d), normal(self.hkv, d), normal(self.hkv, dv)
        out, one = torch.empty(1, self.hq, self.s, dv, device=DEVICE, dtype=FP8), torch.ones(1, 1, 1, 1, device=DEVICE)
        amax = [torch.zeros_like(one) for _ in range(2)]
        handle, fp8, fp32 = cudnn.create_handle(), cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)

        def tensor(x: torch.Tensor, name: str) -> Any:
            kind = fp8 if x.dtype == FP8 else fp32
            return graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind)

        operands = {n: tensor(x, n) for n, x in (("q", q), ("k", k), ("v", v))}
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scales = {n: tensor(one, n) for n in names}
        results = graph.sdpa_fp8(**operands, **scales, attn_scale=d**-0.5, use_causal_mask=True, generate_stats=False)
        o, _, *amaxes = results
        o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(fp8)
        for x in amaxes:
            x.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(fp32)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(1, graph.get_workspace_size()), device=DEVICE, dtype=torch.uint8)
        data = {operands["q"]: q, operands["k"]: k, operands["v"]: v, o: out, **dict.fromkeys(scales.values(), one)}
        data |= dict(zip(amaxes, amax, strict=True))

        def run() -> None:
            cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
            graph.execute(data, workspace, handle=handle)

        return run


def transposition(problem: Problem) -> Callable[[], Any]:
    """The first of ZYFA's two launches alone."""
    from zyfa_kernels.triton import prefill as module

    call = problem.zyfa()
    call()
    prepared = list(module._prepared.values())[-1]

    def run() -> None:
        attend, prepared.attend = prepared.attend, lambda *_: None
        try:
            call()
        finally:
            prepared.attend = attend

    return run


def candidates(shape: str, s: int) -> dict[str, Callable[[], Any]]:
    hq, hkv, d = SHAPES[shape]
    has_fa3 = hasattr(torch.ops._vllm_fa3_C, "fwd")
    packed = Problem(s, hq, hkv, d, 0)
    found: dict[str, Callable[[], Any]] = {}
    if d == 192:
        found["zyfa"], found["transposition"] = packed.zyfa(), transposition(packed)
    else:
        paged, large = (Problem(s, hq, hkv, d, block) for block in (16, 128))
        found["zyfa"], found["zyfa block 128"] = paged.zyfa(), large.zyfa()
        found["zyfa interleaved 64"] = Problem(s, hq, hkv, d, 64, interleaved=True).zyfa()
        found["transposition"] = transposition(paged)
        if has_fa3:
            found["fa3"], found["fa3 block 128"] = paged.fa3(), large.fa3()
        if (shape, s) == ("mha 32 x 128", 16384):
            found["zyfa exact"], found["zyfa int8"] = paged.zyfa("exact"), paged.zyfa(int8=True)
        if hq == hkv and importlib.util.find_spec("cudnn"):
            found["cudnn"] = paged.cudnn()
    if has_fa3:
        found["fa3 packed"] = packed.fa3()
    return found


def captured(call: Callable[[], Any], launches: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return graph


class Sensors:
    """SM clock in MHz and power in W, by NVML where there is one."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception as error:
            print(f"no clocks: {error}", file=sys.stderr)
            self.nvml = None

    def read(self) -> list[int] | None:
        if self.nvml is None:
            return None
        clock = self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
        return [clock, self.nvml.nvmlDeviceGetPowerUsage(self.handle) // 1000]


def measure(calls: dict[str, Callable[[], Any]], launches: int, rounds: int, sensors: Sensors) -> dict[str, Any]:
    graphs = {name: captured(call, launches) for name, call in calls.items()}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: dict[str, list[Any]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            start.record()
            graphs[name].replay()
            stop.record()
            time.sleep(0.01)
            reading = sensors.read()
            stop.synchronize()
            samples[name].append({"ms": start.elapsed_time(stop) / launches, "mhz_w": reading})
    return samples


def host_seconds(call: Callable[[], Any]) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        call()
    taken = (time.perf_counter() - start) / 200
    torch.cuda.synchronize()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write every sample")
    parser.add_argument("--fa3", type=Path, help="vLLM's _vllm_fa3_C extension")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.fa3:
        torch.ops.load_library(str(arguments.fa3))
    elif importlib.util.find_spec("vllm"):
        import vllm.vllm_flash_attn  # noqa: F401
    random.seed(0)
    torch.manual_seed(0)
    sensors, rows = Sensors(), []
    for shape, lengths in LENGTHS.items():
        for s in lengths:
            hq, hkv, d = SHAPES[shape]
            flops = s**2 * hq * (d + min(d, 128))
            launches = max(2, min(100, int(0.02 / (flops / 800e12))))
            samples = measure(candidates(shape, s), launches, arguments.rounds, sensors)
            ms = {name: statistics.median(x["ms"] for x in found) for name, found in samples.items()}
            ratios = {
                name: statistics.median(x["ms"] / z["ms"] for x, z in zip(found, samples["zyfa"], strict=True))
                for name, found in samples.items()
            }
            tflops = {name: flops / t / 1e9 for name, t in ms.items() if name != "transposition"}
            rows.append(dict(shape=shape, s=s, tflops=tflops, ms=ms, time_over_zyfa=ratios, samples=samples))
            text = "  ".join(f"{n} {tflops.get(n, 0):.0f} ({ms[n] * 1e3:.0f} us, {ratios[n]:.2f}x)" for n in ms)
            print(f"{shape:17s} {s:6d}  {text}", flush=True)
    host = host_seconds(Problem(256, 32, 32, 128, 16).zyfa())
    print(f"host time of a call: {host * 1e6:.0f} us")
    if arguments.json:
        facts = dict(
            command=" ".join(["python", *sys.argv]),
            device=torch.cuda.get_device_name(),
            date=time.strftime("%Y-%m-%d"),
            torch=torch.__version__,
            triton=triton.__version__,
            implementation=implementation(DEVICE),
            cudnn=torch.backends.cudnn.version(),
            host_us=host * 1e6,
            rounds=arguments.rounds,
            rows=rows,
        )
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
