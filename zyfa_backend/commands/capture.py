"""`zyfa capture`: post-RoPE Q, K and V of a model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zyfa_backend.commands.common import Json, UserError, log, print_json


def register(app: typer.Typer) -> None:
    app.command()(capture)


def capture(
    model: Annotated[str, typer.Argument(help="A checkpoint directory in Hugging Face's format.")],
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    layers: Annotated[str | None, typer.Option(help='Layer numbers, "0,4,9", or "all"; seven by default.')] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.")] = 2048,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file; the shipped text by default.")] = None,
    json: Json = False,
) -> None:
    """Run a text through MODEL on the CPU and save what its attention layers receive, after RoPE."""
    from zyfa_backend.compare.text import TextError, default_text, read_text
    from zyfa_backend.models.capture import capture as run
    from zyfa_backend.models.errors import ModelError
    from zyfa_backend.models.make import describe

    if not Path(model).is_dir():
        raise UserError(f"{model} is not a directory; give a checkpoint, such as `zyfa model make` writes")
    try:
        chosen = list(range(describe(model)["layers"])) if layers == "all" else _numbers(layers)
        log(f"running {tokens} tokens through {model}")
        taken = run(model, read_text(text) if text else default_text(), chosen, out, tokens)
    except (ModelError, TextError) as error:
        raise UserError(str(error)) from error
    if json:
        print_json(taken)
    else:
        print(
            f"{taken['path']}: layers {', '.join(map(str, taken['layers']))} of {taken['tokens']} tokens, "
            f"{taken['q_heads']} query and {taken['kv_heads']} key-value heads of {taken['qk_dim']}/{taken['v_dim']}"
        )


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f'--layers {text!r} is not accepted; give numbers as in "0,4,9", or "all"') from None
