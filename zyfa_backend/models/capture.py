"""Post-RoPE Q, K and V of a model's attention layers, as numbers to measure attention on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from safetensors import SafetensorError

from zyfa_backend.models.errors import ModelError, require

_NAME = "zyfa_capture"
DEFAULT_LAYERS = 7


def capture(
    model: str | Path, text: str, layers: Sequence[int] | None, path: str | Path, tokens: int = 2048
) -> dict[str, Any]:
    """Runs the first `tokens` tokens of `text` through a checkpoint on the CPU and saves what attention receives.

    layers: layer numbers from 0; None takes seven at equal distances, first and last included.
    Writes `path`, an .npz with, for each layer n, `layern.q` [tokens, Hq, D], `layern.k` [tokens, Hkv, D] and
    `layern.v` [tokens, Hkv, Dv] after RoPE, fp32 arrays that hold the model's bf16 values exactly, and
    `layern.softmax_scale`.
    Returns {path, layers, tokens, q_heads, kv_heads, qk_dim, v_dim, softmax_scale}. Raises ModelError.
    """
    torch, transformers = require("torch"), require("transformers")
    target = Path(path)
    if target.suffix != ".npz" or not target.parent.is_dir():
        raise ModelError(f"cannot write {target}: expected a name that ends in .npz in a directory that exists")
    if target.exists():
        raise ModelError(f"{target} exists; give another name or remove it first")
    if not os.access(target.parent, os.W_OK):
        raise ModelError(f"cannot write {target}: its directory is not writable")
    if tokens < 1:
        raise ModelError(f"tokens={tokens} is not accepted; at least 1 is needed")
    loaded, tokenizer = _load(transformers, torch, str(model))
    chosen = _layers(layers, loaded.config.num_hidden_layers)
    ids = tokenizer(text, verbose=False)["input_ids"][:tokens]
    if text and not ids:
        raise ModelError(f"{model} has no tokenizer that makes tokens of the text")
    if len(ids) < tokens:
        raise ModelError(f"the text has {len(ids)} tokens of this model; {tokens} were asked for, give a longer text")
    limit = getattr(loaded.config, "max_position_embeddings", tokens)
    if tokens > limit:
        raise ModelError(f"tokens={tokens} is more than the model's context of {limit}")
    arrays: dict[str, Any] = {}
    _install(transformers, loaded, arrays, set(chosen))
    with torch.inference_mode():
        loaded.base_model(torch.tensor([ids]), use_cache=False)
    missing = [layer for layer in chosen if f"layer{layer}.q" not in arrays]
    if missing:
        raise ModelError(f"layers {missing} did not call the attention function; their attention cannot be captured")
    part = target.with_name(f".{target.stem}-{os.getpid()}.npz")
    try:
        numpy.savez(part, **arrays)  # type: ignore[arg-type]  # no name is "allow_pickle"
        os.replace(part, target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    q, k, v = (arrays[f"layer{chosen[0]}.{name}"] for name in "qkv")
    return {
        "path": str(target),
        "layers": chosen,
        "tokens": tokens,
        "q_heads": q.shape[1],
        "kv_heads": k.shape[1],
        "qk_dim": q.shape[2],
        "v_dim": v.shape[2],
        "softmax_scale": float(arrays[f"layer{chosen[0]}.softmax_scale"]),
    }


def _load(transformers: Any, torch: Any, model: str) -> tuple[Any, Any]:
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        return loaded, transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ModelError(f"cannot load {model} as a Hugging Face checkpoint: {first}") from error


def _layers(layers: Sequence[int] | None, count: int) -> list[int]:
    if layers is None:
        wanted = min(DEFAULT_LAYERS, count)
        return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers:
        raise ModelError(f"layers {list(layers)} are not accepted; the model has layers 0 to {count - 1}")
    return sorted(set(layers))


def _install(transformers: Any, model: Any, arrays: dict[str, Any], chosen: set[int]) -> None:
    """Makes the model call an attention function that stores its operands, then computes as "sdpa" does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **rest: Any
    ) -> Any:
        if module.layer_idx in chosen:
            for name, x in (("q", query), ("k", key), ("v", value)):  # [1, H, T, D]
                arrays[f"layer{module.layer_idx}.{name}"] = x[0].transpose(0, 1).float().contiguous().numpy()
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            arrays[f"layer{module.layer_idx}.softmax_scale"] = numpy.array(scale, dtype=numpy.float32)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **rest)

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
