"""Post-RoPE Q, K and V of chosen layers, as a model's attention sees them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zyfa_backend.config import ConfigError
from zyfa_backend.models.make import require

_NAME = "zyfa_capture"


def capture(
    model: str, path: str | Path, text: str, layers: list[int] | None = None, tokens: int = 2048
) -> tuple[list[int], int]:
    """Run the first `tokens` tokens of `text` through `model` once and write what attention gets to `path` (.npz).

    layers: layer numbers; None takes seven spread evenly from the first to the last.
    The file holds `layerN.q` [T, Hq, D], `layerN.k` [T, Hkv, D], `layerN.v` [T, Hkv, Dv], fp32 arrays of bf16 values, after
    RoPE, and `layerN.softmax_scale`; `tokens` [T] are the token ids. Returns (layers, tokens captured).
    Raises ConfigError on a model, layer, text or path that does not serve.
    """
    import numpy as np

    require("transformers")
    target = Path(path)
    if target.suffix != ".npz" or not target.parent.is_dir():
        raise ConfigError(f"{target} is not accepted; it ends in .npz and its directory exists")
    if tokens < 1:
        raise ConfigError(f"tokens={tokens} is not accepted; it is at least 1")
    network, ids = _load(model, text, tokens)
    count = network.config.get_text_config().num_hidden_layers
    chosen = spread(count) if layers is None else layers
    if wrong := [layer for layer in chosen if not 0 <= layer < count]:
        raise ConfigError(f"layers {wrong} are not in the model; it has layers 0 to {count - 1}")
    held = _record(network, ids, set(chosen))
    held["tokens"] = np.asarray(ids)
    part = target.with_name(f".{target.name}.{os.getpid()}.npz")
    try:
        np.savez(part, **held)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return chosen, len(ids)


def spread(count: int, wanted: int = 7) -> list[int]:
    """`wanted` of `count` layers, evenly from the first to the last; all where there are fewer."""
    if count <= wanted:
        return list(range(count))
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def _load(model: str, text: str, tokens: int) -> tuple[Any, list[int]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {model!r} is neither a checkpoint directory nor a known name: {reason}") from None
    limit = getattr(network.config.get_text_config(), "max_position_embeddings", tokens)
    if tokens > limit:
        raise ConfigError(f"tokens={tokens} is not accepted; the model takes at most {limit}")
    ids = tokenizer(text, truncation=True, max_length=tokens).input_ids
    if len(ids) < tokens:
        raise ConfigError(f"the text has {len(ids)} tokens; {tokens} were asked for")
    return network.eval(), ids


def _record(network: Any, ids: list[int], layers: set[int]) -> dict[str, Any]:
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    held: dict[str, Any] = {}

    def record(module, query, key, value, attention_mask, *args, **kwargs):
        if module.layer_idx in layers:
            stem = f"layer{module.layer_idx}"
            # transformers holds [1, heads, tokens, D]
            for name, x in (("q", query), ("k", key), ("v", value)):
                held[f"{stem}.{name}"] = x[0].transpose(0, 1).contiguous().float().numpy()
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            held[f"{stem}.softmax_scale"] = torch.tensor(scale, dtype=torch.float32).numpy()
        return plain(module, query, key, value, attention_mask, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_NAME, record)
    network.set_attn_implementation(_NAME)
    with torch.inference_mode():
        network(torch.tensor([ids]), use_cache=False)
    if len(held) != 4 * len(layers):
        raise ConfigError(f"{type(network).__name__} does not route its attention through transformers' interface")
    return held
