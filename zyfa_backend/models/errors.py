"""Errors and imports that the modules of this package share."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class ModelError(Exception):
    """A model cannot be made or captured; the message says why and what would help."""


def require(module: str) -> ModuleType:
    """Imports a module of the extra `zyfa[models]`. Raises ModelError that names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ModelError(f"{module} is not installed ({error}); install it with: pip install 'zyfa[models]'") from error
