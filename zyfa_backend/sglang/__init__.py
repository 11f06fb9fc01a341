"""SGLang plugin: `register()` is the entry point that SGLang calls in every one of its processes."""

from __future__ import annotations

NAME = "zyfa"


def register() -> None:
    """Make `zyfa` an attention backend that SGLang knows. Idempotent; changes nothing where it is not chosen.

    SGLang swallows what a plugin raises, so nothing is raised: a failure is logged as an error with its cause, and
    choosing zyfa then fails with the same cause.
    """
    from zyfa_backend.sglang import registration

    registration.register()
