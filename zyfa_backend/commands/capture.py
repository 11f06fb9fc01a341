"""`zyfa capture`: what the attention of a model sees, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zyfa_backend.commands.common import Json, UserError, log, print_json


def register(app: typer.Typer) -> None:
    app.command()(capture)


def capture(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or a name that transformers can load.")],
    out: Annotated[Path, typer.Option(help="File to write, .npz.")] = Path("capture.npz"),
    layers: Annotated[str, typer.Option(help="Layer numbers, comma separated; seven spread evenly when empty.")] = "",
    tokens: Annotated[int, typer.Option(help="How many tokens of the text.")] = 2048,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text file; the text that ships with ZYFA when left out.")] = None,
    json: Json = False,
) -> None:
    """Write post-RoPE Q, K and V of chosen layers of MODEL to a .npz file."""
    from zyfa_backend.compare.text import default_text
    from zyfa_backend.models.capture import capture as write

    try:
        chosen = [int(part) for part in layers.split(",")] if layers else None
    except ValueError:
        raise UserError(f"--layers {layers} is not accepted; it is layer numbers, comma separated", 2) from None
    try:
        words = text.read_text(encoding="utf-8") if text else default_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {text} cannot be read as UTF-8 text: {error}", 2) from None
    held, count = write(model, out, words, chosen, tokens)
    if json:
        print_json({"path": str(out), "layers": held, "tokens": count})
    else:
        log(f"layers {', '.join(map(str, held))} of {count} tokens: {out}")
