"""Names: the enum member, the environment variable, and the wrapped selectors of vLLM's platform.

vLLM dropped VLLM_ATTENTION_BACKEND after 0.14 and its CPU platform ignores `--attention-backend`, so both are honoured
here by wrapping the platform's class methods. The wrappers pass through whatever does not select ZYFA.
"""

from __future__ import annotations

import functools
import logging
import os

from zyfa_backend import settings
from zyfa_backend.config import ConfigError

NAME = "ZYFA"
BACKEND_PATH = "zyfa_backend.vllm.backend.ZyfaAttentionBackend"
VARIABLE = "VLLM_ATTENTION_BACKEND"
CHOICES = (NAME, "CUSTOM")
SUPPORTED_VLLM = ("0.32", "0.33")

logger = logging.getLogger("vllm.zyfa")


@functools.cache
def register() -> None:
    """Register once in this process; later calls return at once, after a failure they fail again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # The member may be there already: a spawned process makes it when it unpickles its configuration.
    _check_environment([name for name in AttentionBackendEnum.__members__ if name != NAME])
    backend_member(NAME)
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        from vllm.v1.attention.backends.registry import register_backend

        register_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
    _wrap_platform()


def backend_member(name: str):
    """The member `name` of AttentionBackendEnum, added on first use, such that it survives pickling."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if name not in AttentionBackendEnum.__members__:
        quiet = logging.getLogger("vllm.v1.attention.backends.registry")
        level = quiet.level
        # Every process of vLLM would announce the name, chosen or not.
        quiet.setLevel(logging.WARNING)
        try:
            register_backend(name, BACKEND_PATH)
        finally:
            quiet.setLevel(level)
        from zyfa_backend.vllm import enum_member

        member = AttentionBackendEnum[name]
        member.__reduce_ex__ = lambda protocol: (enum_member, (name,))
    return AttentionBackendEnum[name]


def _check_environment(names: list[str]) -> None:
    """Check VLLM_ATTENTION_BACKEND and the ZYFA_* switches before anything starts."""
    value = os.environ.get(VARIABLE, "").strip()
    if value and value.upper() not in (NAME, *names):
        raise ConfigError(
            f"{VARIABLE}={value} is not an attention backend; accepted: {NAME}, and names that vLLM knows, which it "
            f"takes from --attention-backend only: {', '.join(names)}"
        )
    settings.load()
    if unknown := settings.unknown():
        logger.warning("unknown switches %s; ZYFA knows %s", ", ".join(unknown), ", ".join(settings.VARIABLES))
    if value.upper() in CHOICES:
        import vllm.envs

        # Known from here on, so that vLLM does not warn about it and hashes it with its other switches.
        vllm.envs.environment_variables.setdefault(VARIABLE, lambda: os.environ.get(VARIABLE))


def selected(backend=None) -> bool:
    """Whether ZYFA serves a layer for which vLLM was asked for `backend` (an enum member or None).

    An explicit backend beats the environment variable.
    """
    if backend is None:
        return os.environ.get(VARIABLE, "").strip().upper() in CHOICES
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if backend is AttentionBackendEnum.CUSTOM:
        return backend.get_path() == BACKEND_PATH
    return backend.name == NAME


def selected_for(vllm_config, kind: str) -> bool:
    """Whether `vllm_config` selects ZYFA for layers of `kind`, a vLLM KVCacheSpecKind value such as mla_attention."""
    if vllm_config is None:
        return selected(None)
    attention = vllm_config.attention_config
    return selected((attention.backend_per_kind or {}).get(kind, attention.backend))


def _wrap_platform() -> None:
    from vllm.platforms import current_platform

    from zyfa_backend.vllm import selection

    platform = type(current_platform)
    for name in ("get_attn_backend_cls", "get_mla_prefill_backend_cls", "check_and_update_config"):
        original = getattr(platform, name)
        setattr(platform, name, classmethod(_wrapped(getattr(selection, name), original)))
    selection.wrap_attention_layer()


def _wrapped(wrapper, original):
    @functools.wraps(original)
    def call(cls, *args, **kwargs):
        return wrapper(original, *args, **kwargs)

    return call
