"""Errors of `zyfa bench`."""

from __future__ import annotations


class BenchError(ValueError):
    """A setting or the machine does not allow a measurement; the message says what and what would be accepted."""


class Unavailable(Exception):
    """A contender cannot run here or not on this shape; the message is the reason that the report shows."""
