"""`zyfa compare`: what served tokens lose when attention is quantised."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zyfa_backend.commands.common import Json, UserError, log, print_json

if TYPE_CHECKING:
    from zyfa_backend.compare.runner import Outcome, Run

ENGINES = ("vllm", "sglang")


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    call: typer.Context,
    model: Annotated[str, typer.Argument(help="Directory of a checkpoint, or a Hugging Face name.")],
    variants: Annotated[
        str,
        typer.Option(
            help="Comma-separated variants; baseline is always measured. Known: baseline, baseline2 (the noise band), "
            "exact, lean, lean-no-rotation, int8, and those of --define and --url. Default: all of them."
        ),
    ] = "",
    define: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LINE",
            help="A variant of your own: environment settings, then server arguments, for example "
            "'signed=VLLM_ATTENTION_BACKEND=ZYFA ZYFA_CONFIG=lean,rotation=signed --kv-cache-dtype fp8'. Repeatable.",
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="Use a running server for a variant instead of starting one. Without --variants only these are "
            "compared. Repeatable.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to score. Default: the shipped one.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of the text to score. Default: 8192, or a shorter text whole.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=16, help="Tokens of a window. Default 2048, or what the model takes if less.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Log-probabilities listed per position.")] = 200,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts to continue greedily; 0 leaves that out.")] = 16,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a prompt. Default: half the context.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a continuation.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the servers and of the bootstrap.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Directory for results. Default: ./zyfa-results/MODEL, or MODEL-sglang.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything anew, nothing kept from before.")] = False,
    engine: Annotated[str, typer.Option(help="Engine to serve with: vllm or sglang.")] = "vllm",
    server_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARGS",
            help="More arguments for every started server, for example --server-arg=--dtype=float32. Repeatable.",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the started servers. Default: a free one.")
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until a started server must be healthy.")
    ] = 1200.0,
    request_timeout: Annotated[float, typer.Option(min=1, help="Seconds that a request may take.")] = 600.0,
    json: Json = False,
) -> None:
    """Serve MODEL with the engine's own attention and with ZYFA's variants, and compare what they say.

    Each variant gets the same text and prompts over HTTP. Reported are the KL divergence from the baseline, also as a
    multiple of the noise between two unquantised implementations, perplexity, agreement of greedy continuations and
    time to first token, each with a 95% interval: as a table, as results.json and as report.html.
    An interrupted run goes on where it stopped when it is started again.
    """
    if engine not in ENGINES:
        raise UserError(f"--engine {engine} is not accepted; compare serves with {', '.join(ENGINES)}", code=2)
    from zyfa_backend.compare import state
    from zyfa_backend.compare.client import ClientError
    from zyfa_backend.compare.engines import ENGINES as KNOWN_ENGINES
    from zyfa_backend.compare.runner import Run, RunError, ServerOptions, Settings
    from zyfa_backend.compare.server import ServerError
    from zyfa_backend.compare.text import DEFAULT_NAME, TextError, default_text, read_text
    from zyfa_backend.compare.variants import VariantError, select

    _check_model(model)
    # An end by the service manager is cleaned up after like Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        serving = KNOWN_ENGINES[engine]
        asked = [name.strip() for name in variants.split(",") if name.strip()]
        chosen = select(asked, define or [], url or [], serving.variants(model))
        suffix = "" if engine == "vllm" else f"-{engine}"
        directory = out or Path("zyfa-results") / f"{Path(model).resolve().name}{suffix}"
        with _Display() as display:
            run = Run(
                model=model,
                variants=chosen,
                text=read_text(text) if text else default_text(),
                settings=Settings(tokens, context, top_k, prompts, prompt_tokens, max_tokens, seed),
                options=ServerOptions(
                    split_words(server_arg or []),
                    port,
                    startup_timeout,
                    request_timeout,
                ),
                store=state.Store(directory),
                progress=display,
                engine=serving,
            )
            outcome = run.execute(fresh)
    except (ClientError, RunError, ServerError, TextError, VariantError) as error:
        raise UserError(str(error), code=2 if isinstance(error, TextError | VariantError) else 1) from error
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    except KeyboardInterrupt:
        raise UserError(
            f"interrupted; finished variants are kept in {directory}, and the same command goes on from there", code=130
        ) from None
    command = shlex.join(["zyfa", *call.obj])
    results = _write(run, outcome, command, str(text) if text else DEFAULT_NAME)
    if json:
        print_json(results)
    else:
        _print_table(results, directory)
    if outcome.failures:
        names = ", ".join(outcome.failures)
        raise UserError(f"{names} failed (see above); the same command measures only what is missing")


def _check_model(model: str) -> None:
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{model} is not a checkpoint: it has no config.json", code=2)
    elif path.exists() or model.startswith(("/", "./", "../", "~")):
        raise UserError(f"{model} is not a directory; MODEL is a checkpoint's directory or a Hugging Face name", code=2)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _write(run: Run, outcome: Outcome, command: str, text_name: str) -> dict[str, Any]:
    """results.json and report.html; returns the former's document with the files' paths."""
    from zyfa_backend.compare.report import render
    from zyfa_backend.compare.results import document

    results, series = document(run, outcome, command, text_name)
    directory = run.store.directory
    results["files"] = {
        "results": str((directory / "results.json").resolve()),
        "report": str((directory / "report.html").resolve()),
    }
    run.store.write_json("results.json", results)
    run.store.write_text("report.html", render(results, series))
    return results


def _print_table(results: dict[str, Any], directory: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from zyfa_backend.compare.table import COLUMNS, PROMPTS, TEXT, interval_of, machine_line, remarks, value_of

    console = Console()
    if not console.is_terminal:
        console.width = 120  # in a file, nothing is cut off
    with_intervals = console.width >= 110
    print(f"Quality of what {results['model']} serves")
    for group in (TEXT, PROMPTS):
        if group == PROMPTS and results["settings"]["prompts"] == 0:
            continue
        table = Table(show_lines=with_intervals)
        table.add_column(group, no_wrap=True)
        columns = [column for column in COLUMNS if column.group == group]
        for column in columns:
            unit = f"\n[dim]{column.unit}[/dim]" if column.unit else ""
            table.add_column(column.title + unit, justify="right")
        for row in results["variants"]:
            cells = []
            for column in columns:
                interval = interval_of(row, column) if with_intervals else ""
                cells.append(value_of(row, column) + (f"\n[dim]{interval}[/dim]" if interval else ""))
            table.add_row(row["name"], *cells)
        console.print(table)
    print("Below each value: its 95% interval." if with_intervals else "95% intervals: in the report.")
    print("What ran:")
    for row in results["variants"]:
        print(f"  {row['name']:<18}{row['kernel']}")
    for line in [*remarks(results), machine_line(results)]:
        print(line)
    print(f"Report: {directory / 'report.html'}   JSON: {directory / 'results.json'}")


class _Display:
    """Progress of a run on stderr: a bar for the variants, one for the requests of the current variant."""

    def __enter__(self) -> _Display:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._variants = self._progress.add_task("variants", total=None)
        self._steps = self._progress.add_task("", total=None)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def variant(self, name: str, index: int, count: int) -> None:
        self._progress.update(self._variants, completed=index, total=count, description=f"variant {name}")
        if not self._console.is_terminal:
            log(f"variant {index + 1} of {count}: {name}")

    def step(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._steps, completed=done, total=total, description=what)

    def note(self, message: str) -> None:
        self._console.print(message, soft_wrap=True, markup=False, highlight=False)


def split_words(arguments: list[str]) -> tuple[str, ...]:
    """The words of each --server-arg, as a shell would split them. Raises UserError."""
    try:
        return tuple(word for argument in arguments for word in shlex.split(argument))
    except ValueError as error:
        raise UserError(f"--server-arg {arguments} is not accepted: {error}", 2) from None
