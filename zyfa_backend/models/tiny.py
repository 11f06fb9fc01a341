"""Random checkpoints of two layers, one for each architecture and mask that an engine test needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from zyfa_backend.models.errors import require

VOCABULARY = 512
CONTEXT = 8192
WINDOW = 64
_SEED = 20
_SPECIAL = ("<|end|>", "<|begin|>", "<|pad|>")
# Large enough that attention is peaked and the likeliest token stands out, as in a trained model.
_INITIALIZER_RANGE = 0.05

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": _INITIALIZER_RANGE,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": 2,
}


def _mistral(q_heads: int = 4, kv_heads: int = 2, window: int | None = None) -> Any:
    from transformers import MistralConfig

    return MistralConfig(
        **_COMMON, num_attention_heads=q_heads, num_key_value_heads=kv_heads, head_dim=128, sliding_window=window
    )


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=128)


def _deepseek_v2(dense: bool) -> Any:
    """MLA with 192 channels in Q and K (128 and 64 rotary) and 128 in V; experts in the second layer unless dense."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2 if dense else 1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
    )


def _make(config: Callable[[], Any], directory: Path) -> None:
    torch, transformers = require("torch"), require("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = transformers.AutoModelForCausalLM.from_config(config())
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def tokenizer() -> Any:
    """A byte-level BPE tokenizer of 512 tokens, trained on the text that ships with the project."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    from zyfa_backend.compare.text import default_text

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([default_text()], trainer)
    end, begin, pad = _SPECIAL
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, bos_token=begin, pad_token=pad, model_max_length=CONTEXT
    )


_CONFIGS: dict[str, Callable[[], Any]] = {
    "tiny-mistral": _mistral,
    "tiny-mistral-window": partial(_mistral, window=WINDOW),
    "tiny-mistral-odd": partial(_mistral, q_heads=3, kv_heads=1),
    "tiny-qwen3": _qwen3,
    "tiny-deepseek-v2": partial(_deepseek_v2, dense=False),
    "tiny-deepseek-v2-dense": partial(_deepseek_v2, dense=True),
}
MAKERS: dict[str, Callable[[Path], None]] = {name: partial(_make, config) for name, config in _CONFIGS.items()}
