"""vLLM plugin: `register()` is the entry point that vLLM calls in every one of its processes."""

from __future__ import annotations


def register() -> None:
    """Make `ZYFA` a name that vLLM knows, and honour VLLM_ATTENTION_BACKEND=ZYFA. Idempotent; imports no torch code.

    Raises ConfigError when a ZYFA_* switch or VLLM_ATTENTION_BACKEND has a value that is not accepted.
    """
    from zyfa_backend.vllm import registration

    registration.register()


def enum_member(name: str):
    """The registered member `name` of vLLM's AttentionBackendEnum: what a pickled configuration refers to.

    A spawned process unpickles its configuration before it loads plugins, so this registers first.
    """
    from zyfa_backend.vllm import registration

    return registration.backend_member(name)
