"""`zyfa bench`: GPU times of ZYFA and of the peers found on the machine."""

from __future__ import annotations

import json as json_module
import os
import shlex
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zyfa_backend.commands.common import Json, UserError, log, print_json
from zyfa_backend.commands.compare import split_words

if TYPE_CHECKING:
    from zyfa_backend.bench import kernels
    from zyfa_backend.bench.presets import Preset
    from zyfa_backend.bench.servers import Settings as ServingSettings
    from zyfa_backend.bench.shapes import Problem, Shape
    from zyfa_backend.compare.variants import Variant

PARTS = ("kernel", "sustained", "captured", "write", "serving")
BLOCK_SIZES = (16, 32, 64, 128)
LONGEST_S = 3600


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    call: typer.Context,
    parts: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated: {', '.join(PARTS)}. kernel: interleaved launches; sustained: each alone for "
            "seconds; captured: both, on --input; write: rotation, quantisation and cache write; serving: `vllm serve` "
            "with dummy weights. Default: kernel,sustained,write, and captured with --input."
        ),
    ] = "",
    shapes: Annotated[
        str,
        typer.Option(help="Comma-separated: hd64, hd128, mla (192/128), heads as in hd128:32/8; or model presets."),
    ] = "hd128,mla",
    seq: Annotated[str, typer.Option(help="Comma-separated lengths of the sequences.")] = "1024,4096,16384,32768",
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Sequences of a launch.")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--full", help="The mask.")] = True,
    variants: Annotated[
        str, typer.Option(help="ZYFA's kernels: fp8-lean, fp8-exact, int8-lean, int8-exact.")
    ] = "fp8-lean,fp8-exact,int8-lean",
    peers: Annotated[
        str,
        typer.Option(
            help="all, none, or of: fa3-fp8, fa3-fp8-paged, fa3-bf16, cudnn-fp8, sdpa-bf16, aiter-fp8, aiter-bf16. "
            "One that is not installed or refuses a shape is listed with its reason."
        ),
    ] = "all",
    block_size: Annotated[int, typer.Option(help="Tokens of a block of the paged cache: 16, 32, 64, 128.")] = 16,
    warmups: Annotated[int, typer.Option(min=0, help="Launches of each contender before any is timed.")] = 500,
    launches: Annotated[int, typer.Option(min=1, help="Timed launches of each contender.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Turns that the timed launches are spread over.")] = 10,
    warm_in: Annotated[float, typer.Option(min=0, help="Seconds before a sustained measurement.")] = 1.0,
    sustain: Annotated[float, typer.Option(min=0.1, help="Seconds of a sustained measurement.")] = 3.0,
    write_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the write part.")] = 16384,
    write_shape: Annotated[str, typer.Option(help="Shape of the write part.")] = "hd128:32/8",
    input: Annotated[
        Path | None, typer.Option("--input", help="An .npz file of `zyfa capture`, for the captured part.")
    ] = None,
    layers: Annotated[str, typer.Option(help='Layers of --input, as in "0,9"; all of them by default.')] = "",
    models: Annotated[
        str, typer.Option(help="Model presets of the serving part.")
    ] = "mistral-7b-v0.3,qwen3-8b,deepseek-v2-lite",
    prompts: Annotated[str, typer.Option(help="Prompt lengths of the serving part, in tokens.")] = "2048,8192,32768",
    serve: Annotated[
        str,
        typer.Option(help="Servers compared: baseline (always), engine-fp8, lean, exact, int8, or those of --define."),
    ] = "",
    define: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LINE", help="A server of your own, as for `zyfa compare`. Repeatable."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each length to each server.")] = 5,
    concurrency: Annotated[int, typer.Option(min=1, max=512, help="Prompts at once for prefill tokens/s.")] = 4,
    server_rounds: Annotated[int, typer.Option(min=1, help="How often the servers are started in turn.")] = 1,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Start a model's servers side by side and ask them in turn. They share 90% of the GPU's free memory; "
            "of its part each leaves 8 GiB beside weights and KV cache.",
        ),
    ] = False,
    server_arg: Annotated[
        list[str] | None, typer.Option(metavar="ARGS", help="More arguments for every server. Repeatable.")
    ] = None,
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds until a server must be healthy.")] = 1200.0,
    request_timeout: Annotated[float, typer.Option(min=1, help="Seconds that a request may take.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random data.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for results.json and plots.")] = Path("zyfa-results/bench"),
    json: Json = False,
) -> None:
    """Time ZYFA's kernels against the peers found on this machine, interleaved in one process, and served prompts.

    Device time; operands are quantised outside of it. Each result is first compared with torch's SDPA in bf16.
    """
    chosen = _parts(parts, input)
    lengths, prompt_lengths = _numbers("--seq", seq), _numbers("--prompts", prompts)
    wanted_layers = _numbers("--layers", layers, least=0) if layers else None
    if repeats > launches:
        raise UserError(f"--repeats {repeats} is more than --launches {launches}; each turn has a launch", code=2)
    if block_size not in BLOCK_SIZES:
        raise UserError(
            f"--block-size {block_size} is not accepted; choose {', '.join(map(str, BLOCK_SIZES))}", code=2
        )
    for name, value in (("--warm-in", warm_in), ("--sustain", sustain)):
        if not value <= LONGEST_S:
            raise UserError(f"{name} {value:g} is not accepted; it is at most {LONGEST_S} seconds", code=2)
    for path in (out, *out.parents):
        if path.exists():
            if not path.is_dir():
                raise UserError(f"--out {str(out)!r} is not possible: {path} is not a directory", code=2)
            break

    from zyfa_backend.bench import shapes as shape_module
    from zyfa_backend.bench.errors import BenchError

    try:
        attention = [shape_module.parse(text, causal, batch) for text in _words("--shapes", shapes)]
        written = shape_module.parse(write_shape, causal, 1)
        work = _Work(
            parts=chosen,
            problems=[shape_module.at(shape, length) for shape in attention for length in lengths],
            written=shape_module.at(written, write_tokens),
            seed=seed,
            kernel=_kernel_settings(variants, peers, block_size, warmups, launches, repeats, warm_in, sustain),
        )
        if input is not None and "captured" in chosen:
            from zyfa_backend.bench import captures

            work.captured = captures.read(input, causal, wanted_layers)
        if "serving" in chosen:
            from zyfa_backend.bench import presets, servers, serving

            work.models = [presets.load(name) for name in _words("--models", models)]
            work.servers = serving.select([name for name in serve.split(",") if name], define or [])
            for model in work.models:
                serving.lengths(model, tuple(prompt_lengths))
            work.serving = servers.Settings(
                tuple(prompt_lengths),
                requests,
                concurrency,
                server_rounds,
                together,
                split_words(server_arg or []),
                startup_timeout,
                request_timeout,
                seed,
            )
    except BenchError as error:
        raise UserError(str(error), code=2) from error
    _require_gpu()
    signal.signal(signal.SIGTERM, _interrupt)
    document = _measure(work, out, shlex.join(["zyfa", *call.obj]))
    if json:
        print_json(document)
    else:
        _print(document)
    if not document["rows"]:
        reasons = "; ".join(f"{entry['kernel']}: {entry['reason']}" for entry in document["skipped"])
        raise UserError(f"nothing could be measured: {reasons or 'no part had work'}")


@dataclass
class _Work:
    """What is to be measured, once every argument is known to be good."""

    parts: list[str]
    problems: list[Shape]
    written: Shape
    seed: int
    kernel: kernels.Settings
    captured: list[Problem] = field(default_factory=list)
    models: list[Preset] = field(default_factory=list)
    servers: list[Variant] = field(default_factory=list)
    serving: ServingSettings | None = None


def _kernel_settings(variants: str, peers: str, block_size: int, warmups: int, launches: int, repeats: int,
                     warm_in: float, sustain: float) -> Any:  # fmt: skip
    from zyfa_backend.bench import contenders
    from zyfa_backend.bench.errors import BenchError
    from zyfa_backend.bench.kernels import Settings

    names = [] if variants == "none" else _words("--variants", variants)
    unknown = [name for name in names if name not in contenders.VARIANTS]
    if unknown:
        raise BenchError(
            f"variants {', '.join(unknown)} are not known; choose from {', '.join(contenders.VARIANTS)}, or none"
        )
    return Settings(
        tuple(names), tuple(contenders.select(peers)), block_size, warmups, launches, repeats, warm_in, sustain
    )


def _measure(work: _Work, out: Path, command: str) -> dict[str, Any]:
    """Runs the parts; writes results.json after each, so that an interruption keeps what there is."""
    import torch

    from zyfa_backend.bench import kernels, report, serving, shapes, writes
    from zyfa_backend.bench.clocks import Sampler
    from zyfa_backend.bench.errors import BenchError, Unavailable
    from zyfa_backend.compare.client import ClientError
    from zyfa_backend.compare.server import ServerError

    document: dict[str, Any] = {"command": command, "machine": report.machine(), "parts": list(work.parts)}
    with Sampler(_sampled()) as sampler:
        found = kernels.Report(sampler, log)
        document |= {"clocks_by": sampler.tool, "rows": found.rows, "skipped": found.skipped}

        def save() -> None:
            out.mkdir(parents=True, exist_ok=True)
            text = json_module.dumps(document, indent=1, allow_nan=False)
            (out / "results.json").write_text(text + "\n")

        try:
            for part in work.parts:
                if part in ("kernel", "sustained"):
                    for shape in work.problems:
                        log(f"{part}: {shape}")
                        problem = shapes.gaussian(shape, work.seed)
                        if part == "kernel":
                            kernels.kernel_only(part, problem, work.kernel, found)
                        else:
                            kernels.sustained(part, [problem], work.kernel, found)
                        save()
                elif part == "captured":
                    problems = [problem.to("cuda") for problem in work.captured]
                    for problem in problems:
                        log(f"{part}: {problem.shape}")
                        kernels.kernel_only(part, problem, work.kernel, found)
                    kernels.sustained("captured-sustained", problems, work.kernel, found)
                elif part == "write":
                    log(f"{part}: {work.written}")
                    try:
                        writes.measure(work.written, work.kernel, ["fp8_e4m3", "int8"], found)
                    except Unavailable as error:
                        found.skipped.append({"kernel": "write", "shape": str(work.written), "reason": str(error)})
                elif part == "serving":
                    for preset in work.models:
                        assert work.serving is not None
                        found.rows += serving.measure(
                            preset, work.servers, work.serving, log, found.skipped, sampler, out / "logs"
                        )
                        save()
                save()
            document["files"] = [str(out / "results.json"), *report.plots(found.rows, out)]
            save()
        except BenchError as error:
            raise UserError(str(error), code=2) from error
        except (ServerError, ClientError) as error:
            raise UserError(str(error)) from error
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(f"the GPU's memory does not hold this: {str(error).splitlines()[0]}") from error
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}") from error
        except KeyboardInterrupt:
            raise UserError(f"interrupted; what was measured is in {out / 'results.json'}", code=130) from None
    return document


def _sampled() -> str | None:
    """What nvidia-smi or rocm-smi calls the current GPU; None where that is not known."""
    import torch

    from zyfa_backend.bench.clocks import rocm_index

    current = torch.cuda.current_device()
    if torch.version.hip:
        return rocm_index(current, os.environ)
    uuid = getattr(torch.cuda.get_device_properties(current), "uuid", None)
    return f"GPU-{uuid}" if uuid else None


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"bench needs a CUDA or ROCm GPU; torch {torch.__version__} sees none here (`zyfa doctor` tells what runs)"
        )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parts(text: str, input: Path | None) -> list[str]:
    if input is not None and not input.is_file():
        raise UserError(f"--input {str(input)!r} is not a file", code=2)
    if not text:
        return ["kernel", "sustained", *(["captured"] if input else []), "write"]
    chosen = _words("--parts", text)
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise UserError(f"--parts {', '.join(unknown)} is not accepted; choose from {', '.join(PARTS)}", code=2)
    if "captured" in chosen and input is None:
        raise UserError("the captured part needs --input FILE.npz, which `zyfa capture` writes", code=2)
    return chosen


def _words(option: str, text: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UserError(f"{option} {text!r} is empty", code=2)
    return words


def _numbers(option: str, text: str, least: int = 1, most: int = 1 << 20) -> list[int]:
    numbers = []
    for word in _words(option, text):
        if not word.isascii() or not word.isdigit() or not least <= int(word) <= most:
            raise UserError(
                f"{option} {text!r} is not accepted; give whole numbers from {least} to {most}, as in 1024,4096", code=2
            )
        numbers.append(int(word))
    return numbers


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from zyfa_backend.bench import report

    console = Console()
    if not console.is_terminal:
        console.width = 220  # in a file, nothing is cut off
    facts = document["machine"]
    versions = facts["versions"]
    print(f"{facts['device']}, torch {versions.get('torch')}, triton {versions.get('triton')}")
    for title, columns, cells in report.table(document["rows"]):
        table = Table(*columns, title=title)
        for row in cells:
            table.add_row(*row)
        console.print(table)
    for entry in document["skipped"]:
        print(f"not measured: {entry['kernel']} on {entry['shape']}: {entry['reason']}")
    print("Files: " + ", ".join(document["files"]))
