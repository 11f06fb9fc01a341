"""The `zyfa` command."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib import metadata
from typing import Annotated, Any

import typer

from zyfa_backend import commands
from zyfa_backend.commands.common import UserError, log
from zyfa_backend.config import ConfigError

# typer 0.16 and later carry their own copy of click, earlier ones use the package: take the class from typer's own.
_USAGE_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def application() -> typer.Typer:
    """The typer application with the commands of every module in `zyfa_backend.commands`."""
    app = typer.Typer(
        name="zyfa",
        help="FP8 prefill attention for vLLM and SGLang: what runs here, what it costs, how fast it is.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        if version:
            print(f"zyfa {metadata.version('zyfa')}")
            raise typer.Exit()
        if context.invoked_subcommand is None:
            print(context.get_help())

    for module in sorted(entry.name for entry in pkgutil.iter_modules(commands.__path__) if entry.name != "common"):
        importlib.import_module(f"{commands.__name__}.{module}").register(app)
    return app


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status. What a user can mend is one message on stderr."""
    try:
        return int(application()(args=arguments, prog_name="zyfa", standalone_mode=False, obj=arguments) or 0)
    except UserError as error:
        log(f"zyfa: error: {error}")
        return error.code
    except ConfigError as error:
        log(f"zyfa: error: {error}")
        return 2
    except _USAGE_ERROR as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "zyfa"
        log(f"{where}: error: {' '.join(error.format_message().split())} (see `{where} --help`)")
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        log("zyfa: interrupted")
        return 130
    except BrokenPipeError:
        return 141


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
