"""What compare needs to know of SGLang: its API, its variants, and what its log tells."""

from __future__ import annotations

import functools
import re
import uuid
from importlib import metadata
from typing import Any

from .client import Client, ClientError, Continuation, parse_prompt_logprobs
from .metrics import TopK
from .variants import BASELINE, KNOWN, NOISE, Variant


class SglangClient(Client):
    """One server of SGLang: its native /generate, which takes token ids and returns log-probabilities of a prompt."""

    def version(self) -> str:
        try:
            return str(self._request("GET", "/server_info")["version"])
        except (ClientError, KeyError):
            return "unknown"

    def score(self, ids: list[int], top_k: int) -> TopK:
        body = self._generate_body(ids, 1, return_logprob=True, logprob_start_len=0, top_logprobs_num=top_k)
        meta = self._request("POST", "/generate", body).get("meta_info", {})
        own, top = meta.get("input_token_logprobs") or [], meta.get("input_top_logprobs") or []
        if len(own) != len(ids) or len(top) != len(ids):
            raise ClientError(f"{self.url} returned no prompt log-probabilities; compare needs a server of SGLang")
        listed = [
            {str(token): {"logprob": value} for value, token, _ in (*entries, actual)}
            for entries, actual in zip(top[1:], own[1:], strict=True)
        ]
        return parse_prompt_logprobs(listed, ids[1:])

    def generate(self, ids: list[int], max_tokens: int) -> Continuation:
        body = self._generate_body(ids, max_tokens, stream=True)
        # Each event repeats the tokens before it.
        return self._stream("/generate", body, max_tokens, lambda event, _: list(event.get("output_ids") or []))

    def _generate_body(self, ids: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            # Keeps every request out of another's cached prefix, also on a server that caches prefixes.
            "extra_key": uuid.uuid4().hex,
            **extra,
        }


@functools.cache
def on_cpu() -> bool:
    """Whether servers started here run on a CPU: by the torch that is installed."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


@functools.cache
def is_mla(model: str) -> bool:
    """Whether a checkpoint, a directory or a Hugging Face name, has MLA layers; False where its config isn't found."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return False
    return getattr(config.get_text_config(), "kv_lora_rank", None) is not None


def known(model: str) -> dict[str, Variant]:
    """The variants of a model by name. On a GPU ZYFA prefills and the engine decodes, but for int8, which it can't."""
    if is_mla(model):
        return _variants(PREFILL)  # the latent cache stays the engine's
    if on_cpu():
        return _variants((*BOTH, *FP8))
    return _variants((*PREFILL, *FP8)) | {"int8": _variants((*EACH, *FP8))["int8"]}


FP8 = ("--kv-cache-dtype", "fp8_e4m3")
PREFILL, BOTH = ("--prefill-attention-backend", "zyfa"), ("--attention-backend", "zyfa")
EACH = (*PREFILL, "--decode-attention-backend", "zyfa")  # also beside a user's --attention-backend


@functools.cache
def _variants(args: tuple[str, ...]) -> dict[str, Variant]:
    return {
        name: variant
        if name in (BASELINE, NOISE)
        else Variant(name, {"ZYFA_CONFIG": name}, args, what=variant.what)
        for name, variant in KNOWN.items()
    }


UNQUANTISED = Variant(
    NOISE,
    {"ZYFA_CONFIG": "unquantized"},
    (*BOTH, "--kv-cache-dtype", "auto"),
    what="ZYFA with quantisation off, as the noise band",
)


def second_baseline(platform: str, backend: str) -> Variant:
    """What serves as the noise band: another unquantised backend of the engine, or ZYFA with quantisation off."""
    if platform not in ("cuda", "rocm") or backend not in ("fa3", "fa4", "flashinfer", "aiter", "triton"):
        return UNQUANTISED
    # On a GPU ZYFA leaves what is not quantised to triton, which would be no second implementation beside itself.
    name = "torch_native" if backend == "triton" else "triton"
    return Variant(NOISE, {}, ("--attention-backend", name), what=f"the engine's {name}, as the noise band")


def attention_backend(log: str) -> str:
    """The attention backend that the engine resolved to, from the arguments that it logs."""
    prefill, decode, both = (_argument(log, name) for name in _BACKENDS)
    prefill, decode = prefill or both, decode or both
    if not prefill or not decode:
        return "unknown"
    return prefill if prefill == decode else f"{prefill} + {decode}"


_BACKENDS = ("prefill_attention_backend", "decode_attention_backend", "attention_backend")


def platform_of(log: str) -> str:
    """"cpu", "cuda", "rocm" or "unknown", from the arguments that the engine logs."""
    device = _argument(log, "device")
    if device == "cuda" and "aiter" in attention_backend(log):
        return "rocm"
    return device or "unknown"


def _argument(log: str, name: str) -> str | None:
    """The last value of an argument in `server_args={…}` or `ServerArgs(…)`; None where it is None or not there."""
    found = re.findall(rf"\b{name}(?:': |=)(?:'([^']*)'|None)", log)
    return found[-1] or None if found else None
