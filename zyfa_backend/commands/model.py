"""`zyfa model make`: checkpoints to try ZYFA with, without a download."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from zyfa_backend.commands.common import Json, log, print_json


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Checkpoints to try ZYFA with, made on the spot.", no_args_is_help=True)
    group.command("make")(make)
    group.command("list")(names)
    app.add_typer(group, name="model")


def make(
    name: Annotated[str, typer.Argument(help="tiny-mistral, tiny-qwen3, tiny-deepseek-v2, smollm2-hd128, …; see `list`.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where it goes: a new or an empty directory.")],
    json: Json = False,
) -> None:
    """Write a Hugging Face checkpoint to DIR."""
    from zyfa_backend.models.make import make as write

    made = write(name, directory)
    if json:
        print_json(dataclasses.asdict(made))
    else:
        log(f"{made.architecture}, head dimension {made.head_dim}: {made.path}")


def names(json: Json = False) -> None:
    """List the names that `make` knows."""
    from zyfa_backend.models.make import NAMES

    if json:
        print_json({"models": list(NAMES)})
    else:
        print("\n".join(NAMES))
