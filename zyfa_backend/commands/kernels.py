"""`zyfa kernels`: the gfx950 kernels — list, build, check, run, cycle model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from zyfa_backend.commands.common import Json, UserError, log, print_json

Name = Annotated[str, typer.Argument(help="Name of a kernel, see `zyfa kernels list`.")]
NameOrFile = Annotated[str, typer.Argument(help="Name of a kernel, or the path of a gfx950 code object.")]


class BadInput(UserError):
    """An argument that is not accepted: exit status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=2)


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The gfx950 assembly kernels: list, build, check, run, cycle model.", no_args_is_help=True)
    for command in (build, check, cycles, run):
        group.command()(_with_extra(command))
    group.command(name="list")(_with_extra(list_kernels))
    app.add_typer(group, name="kernels")


def _with_extra(command: Callable[..., None]) -> Callable[..., None]:
    """The command; a package of the extra that is not installed is an error of one line."""

    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except ModuleNotFoundError as error:
            raise UserError(f"`zyfa kernels` needs {error.name}; it comes with zyfa's extra gfx950") from error

    return wrapped


def _kernel(name: str) -> Any:
    from zyfa_kernels.runtime.registry import UnknownKernel, kernel

    try:
        return kernel(name)
    except UnknownKernel as error:
        raise BadInput(str(error)) from error


def _code(name_or_file: str) -> bytes:
    """The code object of a kernel of ours, or the bytes of a file."""
    from zyfa_kernels.runtime.cache import code_object
    from zyfa_kernels.runtime.registry import names
    from zyfa_kernels.runtime.toolchain import AssemblyError

    if name_or_file in names():
        try:
            return code_object(name_or_file)
        except AssemblyError as error:
            raise UserError(str(error)) from error
    try:
        return Path(name_or_file).read_bytes()
    except OSError as error:
        raise BadInput(
            f"{name_or_file!r} is neither a readable file ({error.strerror}) nor one of {', '.join(names())}"
        ) from error


def list_kernels(json: Json = False) -> None:
    """Every kernel: head dims, operand format, exact or lean P, resources."""
    from zyfa_kernels.runtime.registry import names

    rows = []
    for name in names():
        made = _kernel(name)
        p = made.properties
        rows.append(
            {
                "name": name,
                "qk_dim": p["qk_dim"],
                "v_dim": p["v_dim"],
                "format": p["format"],
                "causal": p["causal"],
                "probabilities": "lean" if p["lean"] else "exact",
                "vgprs": made.vgprs,
                "sgprs": made.sgprs,
                "lds_bytes": made.lds_bytes,
                "waves": made.threads // 64,
            }
        )
    if json:
        print_json({"kernels": rows})
    else:
        _table(rows)


def build(
    name: Annotated[str | None, typer.Argument(help="Name of a kernel; all without it.")] = None,
    out: Annotated[str, typer.Option("--out", help="Folder for the .s and .hsaco files; made if missing.")] = ".",
    json: Json = False,
) -> None:
    """Write the assembly text and the linked code object."""
    from zyfa_kernels.runtime.files import write_whole
    from zyfa_kernels.runtime.registry import names

    if not out:
        raise BadInput("--out '' is not accepted; give the path of a folder, or . for the current one")
    folder, files = Path(out), []
    for each in [name] if name else names():
        text, code = _kernel(each).text(), _code(each)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for suffix, data in ((".s", text.encode()), (".hsaco", code)):
                path = folder / f"{each}{suffix}"
                write_whole(path, data)
                files.append(str(path))
        except OSError as error:
            raise BadInput(f"--out {out!r}: {error.strerror}") from error
    if json:
        print_json({"files": files})
    else:
        print("\n".join(files))


def check(
    target: NameOrFile,
    like: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Run the file as this kernel, with its arguments and late loads."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit with 1 for advice too: hazards that LLVM's tables ask to space further apart, but that code "
            "known to run does not.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Static checks of the machine code: hazards, waits, LDS, registers. Exits with 1 if there is a violation.

    A kernel of ours is also run on the emulator with late loads, for what depends on its arguments; so is a file that
    is a variation of one, with --as NAME.
    """
    from zyfa_kernels.runtime.registry import names

    if like is not None and target in names():
        raise BadInput(f"--as {like!r} goes with a file; {target!r} is a kernel of ours and always runs as itself")
    if like is not None and like not in names():
        raise BadInput(f"--as {like!r} is not accepted; choose {', '.join(names())}")
    code = _loaded(target)
    if like is not None and _kernel(like).symbol not in code.kernels:
        raise BadInput(
            f"--as {like!r}: {target!r} holds {', '.join(code.kernels)}, not the kernel {_kernel(like).symbol}"
        )
    from zyfa_kernels.emulator.checks import check as run_checks
    from zyfa_kernels.emulator.checks.report import of_error

    from zyfa_backend.kernel_run import delayed_run

    report = run_checks(code)
    name = target if target in names() else like
    if name is not None:
        try:
            found = delayed_run(name, None if like is None else code)
        except ValueError as error:  # another size of workgroup or arguments than the kernel it is run as
            raise BadInput(f"{target!r} does not run as {name}: {error}") from error
        report.violations += [of_error(error, name) for error in found]
        report.notes.append(f"{name}: also run with arguments and late loads, over 1 to 8 tiles of keys")
    if json:
        print_json(report.as_dict())
    else:
        for violation in report.violations:
            print(violation)
        for advice in report.advice:
            print(f"advice: {advice}")
        for note in report.notes:
            print(f"note: {note}")
        print(
            f"{len(report.violations)} violations, {len(report.advice)} advice, {report.instructions} instructions, "
            f"{report.mfma} of them matrix, {report.bank_conflicts} bank conflicts in the main loop"
        )
    if report.violations or (strict and report.advice):
        raise typer.Exit(1)


def cycles(
    target: NameOrFile,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Write the timeline to this .png or .svg file.")
    ] = None,
    json: Json = False,
) -> None:
    """The cycle model's view of the main loop. All figures are modelled, none is measured."""
    code = _loaded(target)
    from zyfa_kernels.emulator.cycles import model

    if picture and (picture.suffix not in (".png", ".svg") or not picture.parent.is_dir() or picture.is_dir()):
        raise BadInput(f"--picture {str(picture)!r} is not accepted; a .png or .svg in a folder that exists")
    try:
        report = model(code)
    except ValueError as error:
        raise BadInput(f"{target}: {error}") from error
    if picture:
        try:
            report.picture(picture)
        except OSError as error:
            raise UserError(f"--picture {str(picture)!r}: {error.strerror}") from error
    if json:
        print_json(report.as_dict())
        return
    for key in ("cycles_per_block", "matrix_busy", "vector_busy", "limiter", "predicted_fraction_of_peak"):
        value = getattr(report, key)
        print(f"{key:<28} {f'{value:.3f}' if isinstance(value, float) else value} (modelled)")
    for barrier in report.barriers:
        where = " and ".join(barrier["addresses"])
        print(f"barrier {where}: {barrier['last']} arrives last, waited for {barrier['other_waits_cycles']:.0f} cycles")
    print("stalls, cycles a block:", ", ".join(f"{reason} {value:.0f}" for reason, value in report.stalls.items()))


def _loaded(target: str) -> Any:
    from zyfa_kernels.emulator import CodeObject, CodeObjectError, UnknownInstruction

    data = _code(target)
    try:
        return CodeObject.load(data)
    except (CodeObjectError, UnknownInstruction) as error:
        raise BadInput(f"{target}: {str(error).removeprefix('the given bytes: ')}") from error


def run(
    name: Name,
    seq: Annotated[
        str | None, typer.Option("--seq", help="Query tokens (default 256, or all of the file); 70,1,257 is a batch.")
    ] = None,
    q_heads: Annotated[int | None, typer.Option("--q-heads", help="Default 1, or the file's.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Default 1, or the file's.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="Must agree with the kernel's name.")] = None,
    context: Annotated[
        str, typer.Option("--context", help="Keys before the first query: one number, or one for each of --seq.")
    ] = "0",
    input: Annotated[
        str, typer.Option("--input", help="gaussian, peaked, ones, or an .npz file with q, k and v.")
    ] = "gaussian",
    page: Annotated[
        int | None, typer.Option("--page", help="K and V in shuffled pages of this many tokens; packed without it.")
    ] = None,
    window: Annotated[int | None, typer.Option("--window", help="A query sees no key further back than this.")] = None,
    layer: Annotated[int | None, typer.Option("--layer", help="Layer of an .npz file that holds several.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random inputs.")] = 0,
    on: Annotated[str, typer.Option("--on", help="emulator or gpu.")] = "emulator",
    json: Json = False,
) -> None:
    """Run a kernel and compare it with the reference and with fp64 on the same quantised inputs."""
    from zyfa_backend import kernel_captures, kernel_run

    properties = _kernel(name).properties
    if causal is not None and causal != properties["causal"]:
        wanted = "--causal" if properties["causal"] else "--full"
        raise BadInput(f"{name} has a fixed mask; it runs with {wanted}")
    if on not in kernel_run.DEVICES:
        raise BadInput(f"--on {on!r} is not accepted; choose {' or '.join(kernel_run.DEVICES)}")
    mask, lean = properties["causal"], properties["lean"]
    lengths = None if seq is None else _numbers("--seq", seq)
    contexts = _numbers("--context", context)
    try:
        if input.endswith(".npz"):
            if (lengths and len(lengths) > 1) or len(contexts) > 1:
                raise BadInput(f"--seq {seq} --context {context}: a file is one sequence, so each is one number")
            length = None if lengths is None else lengths[0]
            problems = kernel_captures.load(Path(input), layer, length, contexts[0], mask, lean, window)
            q, k = problems[0].q.data.shape[1], problems[0].k.data.shape[1]
            for option, asked, has in (("--q-heads", q_heads, q), ("--kv-heads", kv_heads, k)):
                if asked not in (None, has):
                    raise BadInput(f"{option} {asked}: {input!r} holds {has}")
        elif input in kernel_run.INPUTS:
            if layer is not None:
                raise BadInput(f"--layer {layer} goes with an .npz file, not with --input {input}")
            lengths = lengths or [256]
            if len(contexts) not in (1, len(lengths)):
                raise BadInput(f"--context has {len(contexts)} numbers and --seq {len(lengths)}; give one, or as many")
            pairs = list(zip(lengths, contexts * (len(lengths) // len(contexts)), strict=True))
            heads = [1 if n is None else n for n in (q_heads, kv_heads)]
            problems = kernel_run.generate(input, pairs, heads[0], heads[1], mask, lean, seed, window)
        else:
            raise BadInput(f"--input {input!r} is not accepted; choose {', '.join(kernel_run.INPUTS)} or an .npz file")
        result = kernel_run.compare(name, problems, on, page)
    except (ValueError, RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise UserError(f"--seq {seq} --context {context}: more memory than this machine has") from error
        raise (BadInput if isinstance(error, ValueError) else UserError)(" ".join(str(error).split())) from error
    if json:
        print_json(result)
    else:
        log(f"{name} on {on}")
        _table([result])


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers with commas between."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise BadInput(f"{option} {text!r} is not accepted; give a whole number, or several as in 70,1,257") from error


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 160
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
