"""What all commands share: the --json flag, output, and errors in one line."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else there.")]


class UserError(Exception):
    """Something the user can mend. `zyfa` prints the message, without a traceback, and exits with `code`."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def print_json(document: Any) -> None:
    """The document to stdout, strict JSON: NaN and infinities raise ValueError instead of being written."""
    print(json.dumps(document, indent=2, allow_nan=False), flush=True)


def log(message: str) -> None:
    """A line to stderr."""
    print(message, file=sys.stderr, flush=True)
