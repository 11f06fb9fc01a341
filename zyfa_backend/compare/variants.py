"""The servers that are compared: names, environment and arguments."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

BASELINE = "baseline"
NOISE = "baseline2"
DEFAULT = (BASELINE, NOISE, "exact", "lean", "lean-no-rotation", "int8")
BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"


class VariantError(ValueError):
    """A variant is unknown or badly written; the message says what is accepted."""


@dataclass(frozen=True)
class Variant:
    """One server: what its environment and command line add to the baseline's, or the URL of a running one."""

    name: str
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    url: str | None = None
    what: str = ""

    @property
    def uses_zyfa(self) -> bool:
        named = [self.env.get(BACKEND_VARIABLE, ""), *self.args]
        return any("ZYFA" in word.upper() for word in named) or any(name.startswith("ZYFA_") for name in self.env)


def _zyfa(name: str, what: str) -> Variant:
    return Variant(name, {BACKEND_VARIABLE: "ZYFA", "ZYFA_CONFIG": name}, ("--kv-cache-dtype", "fp8"), what=what)


UNQUANTISED = Variant(
    NOISE,
    {BACKEND_VARIABLE: "ZYFA", "ZYFA_CONFIG": "unquantized"},
    ("--kv-cache-dtype", "auto"),
    what="ZYFA with quantisation off, as the noise band",
)

KNOWN: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(BASELINE, what="the engine's own attention in the model's dtype"),
        Variant(NOISE, what="a second attention without quantisation, as the noise band"),
        _zyfa("exact", "FP8 Q, K, V with rotation; P rounded exactly"),
        _zyfa("lean", "FP8 Q, K, V with rotation; P by one multiply-add (the default)"),
        _zyfa("lean-no-rotation", "as lean, without the Hadamard rotation"),
        _zyfa("int8", "INT8 Q and K with rotation, FP8 V, lean P"),
    )
}


def select(
    names: list[str], defined: list[str], urls: list[str], known: Mapping[str, Variant] = KNOWN
) -> list[Variant]:
    """The variants of a run, baseline first. Raises VariantError naming what is wrong.

    known: the engine's variants by name.
    names: from --variants, may be empty. defined: NAME=DEFINITION of --define. urls: NAME=URL of --url.
    """
    pool = dict(known)
    for text in defined:
        variant = parse_definition(text)
        pool[variant.name] = variant
    running = [parse_url(text) for text in urls]
    for variant in running:
        pool[variant.name] = variant
    if not names:
        extra = [text.split("=", 1)[0] for text in defined]
        names = [variant.name for variant in running] + extra if running else [*DEFAULT, *extra]
    unknown = [name for name in names if name not in pool]
    if unknown:
        raise VariantError(
            f"unknown variant {', '.join(unknown)}; known are {', '.join(pool)}, others through --define or --url"
        )
    ordered = list(dict.fromkeys([BASELINE, *names]))  # everything is measured against the baseline
    return [pool[name] for name in ordered]


def parse_definition(text: str) -> Variant:
    """`NAME=VARIABLE=VALUE … --flag …`: a shell line of environment settings and server arguments."""
    name, separator, line = text.partition("=")
    _check_name(name, text, separator, "--define 'NAME=VARIABLE=VALUE … --flag …'")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise VariantError(f"--define {name}: {error}") from error
    env: dict[str, str] = {}
    while words and not words[0].startswith("-"):
        variable, separator, value = words.pop(0).partition("=")
        if not separator or not variable.isidentifier():
            raise VariantError(f"--define {name}: {variable!r} is neither VARIABLE=VALUE nor a --flag")
        env[variable] = value
    return Variant(name, env, tuple(words), what=f"defined as: {line}")


def parse_url(text: str) -> Variant:
    name, separator, url = text.partition("=")
    _check_name(name, text, separator, "--url NAME=http://HOST:PORT")
    if not url.startswith(("http://", "https://")):
        raise VariantError(f"--url {name}={url} is not accepted; the address begins with http:// or https://")
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise VariantError(f"--url {name}={url} is not accepted: {error}") from None
    return Variant(name, url=url.removesuffix("/"), what=f"running server at {url}")


def _check_name(name: str, text: str, separator: str, form: str) -> None:
    if not separator or not name or not all(letter.isalnum() or letter in "-_." for letter in name) or name[0] == ".":
        raise VariantError(f"{text!r} is not accepted; the form is {form}, NAME of letters, digits, '-', '_', '.'")


def second_baseline(platform: str, backend: str) -> Variant:
    """What serves as the noise band once the baseline told its platform ("cpu", "cuda", "rocm") and its backend.

    The engine's other unquantised backend where it has one, else ZYFA with quantisation off. Two runs of the same
    backend would agree bit for bit and call any difference an infinite multiple of the noise.
    """
    if platform not in ("cuda", "rocm"):
        return UNQUANTISED
    if "MLA" in backend:
        candidates = ["TRITON_MLA"]
    else:
        candidates = ["TRITON_ATTN", "FLASH_ATTN" if platform == "cuda" else "ROCM_ATTN"]
    other = next((name for name in candidates if name != backend), None)
    if other is None:
        return UNQUANTISED
    return Variant(NOISE, {}, ("--attention-backend", other), what=f"the engine's {other}, as the noise band")
