"""Names: the choice of SGLang's command line and the backend's factory.

Each registration is done once in a process. A failure is not raised, since SGLang would go on without the plugin: it
is logged, and kept as the answer to whoever chooses zyfa.
"""

from __future__ import annotations

import functools
import logging

from zyfa_backend import settings
from zyfa_backend.sglang import NAME, cpu_cache, cpu_indices

SUPPORTED_SGLANG = ("0.5.18", "0.5.23")

logger = logging.getLogger("sglang.zyfa")


class RegistrationError(RuntimeError):
    """ZYFA could not be made a backend of this SGLang; the cause is the message and the exception's cause."""


@functools.cache
def register() -> None:
    """Register once in this process; later calls return at once."""
    failure = None
    try:
        _check_environment()
        cpu_cache.allow()
        cpu_indices.allow()
    except Exception as error:
        failure = error
        logger.error("ZYFA cannot serve in this process: %s: %s", type(error).__name__, error, exc_info=error)
    try:
        _add_choice()
        _add_backend(failure)
    except Exception as error:
        # Without the choice, `--attention-backend zyfa` ends with SGLang's own list of choices.
        logger.error(
            "ZYFA is not an attention backend of this SGLang: %s: %s. It supports SGLang %s to %s",
            type(error).__name__, error, *SUPPORTED_SGLANG, exc_info=error,
        )


def _check_environment() -> None:
    """Check the ZYFA_* switches. Raises ConfigError."""
    settings.load()
    if unknown := settings.unknown():
        logger.warning("unknown switches %s; ZYFA knows %s", ", ".join(unknown), ", ".join(settings.VARIABLES))


def _add_choice() -> None:
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:
        # 0.5.18 keeps the list beside its arguments.
        from sglang.srt import server_args as choices
    # SGLang's adders extend a plain list, which would show a name twice.
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    if NAME not in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        choices.add_chunked_prefix_cache_attention_backend(NAME)


def _add_backend(failure: Exception | None) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(functools.partial(create, failure))


def create(failure: Exception | None, model_runner):
    """The backend for `model_runner`, a ModelRunner of SGLang. Raises RegistrationError where `register` failed."""
    if failure is not None:
        raise RegistrationError(f"zyfa was chosen, but could not be registered: {failure}") from failure
    from zyfa_backend.sglang import selection

    return selection.create(model_runner)
