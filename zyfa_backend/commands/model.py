"""`zyfa model make`: a checkpoint to test or to measure with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zyfa_backend.commands.common import Json, UserError, log, print_json


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Checkpoints to test and measure with.", no_args_is_help=True)
    group.command()(make)
    app.add_typer(group, name="model")


def make(
    name: Annotated[
        str,
        typer.Argument(
            help="tiny-mistral, tiny-mistral-window, tiny-mistral-odd, tiny-qwen3, tiny-deepseek-v2, "
            "tiny-deepseek-v2-dense (random weights) or smollm2-hd128 (SmolLM2-135M-Instruct)."
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; created, or an empty directory.")],
    json: Json = False,
) -> None:
    """Make a checkpoint in Hugging Face's format, without a download."""
    from zyfa_backend.models.errors import ModelError
    from zyfa_backend.models.make import make as build

    log(f"making {name} in {directory}")
    try:
        made = build(name, directory)
    except ModelError as error:
        raise UserError(str(error)) from error
    if json:
        print_json(made)
    else:
        print(
            f"{made['path']}: {made['architecture']}, {made['layers']} layers, {made['q_heads']} query and "
            f"{made['kv_heads']} key-value heads, head dimension {made['head_dim']}"
        )
