"""Writes small Hugging Face checkpoints: random ones of each supported architecture, and a real language model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zyfa_backend.config import ConfigError

VOCABULARY = 512
SEED = 20261201
# Two layers and few channels, but the head dimensions of the real models.
_TINY: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, pad_token_id=1,
)
_MLA: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128,
)


@dataclass(frozen=True)
class Made:
    """A written checkpoint: its directory, architecture and head dimension (of Q and K)."""

    path: str
    architecture: str
    head_dim: int


@dataclass(frozen=True)
class _Tiny:
    config: str
    model: str
    head_dim: int
    settings: dict[str, Any]


_TINY_MODELS = {
    "tiny-mistral": _Tiny("MistralConfig", "MistralForCausalLM", 128, dict(head_dim=128, sliding_window=None)),
    "tiny-mistral-window": _Tiny("MistralConfig", "MistralForCausalLM", 128, dict(head_dim=128, sliding_window=200)),
    "tiny-mistral-odd": _Tiny(
        "MistralConfig", "MistralForCausalLM", 128,
        dict(head_dim=128, sliding_window=None, num_attention_heads=3, num_key_value_heads=1),
    ),
    "tiny-mistral-hd64": _Tiny("MistralConfig", "MistralForCausalLM", 64, dict(head_dim=64, sliding_window=None)),
    "tiny-mistral-hd96": _Tiny("MistralConfig", "MistralForCausalLM", 96, dict(head_dim=96, sliding_window=None)),
    "tiny-qwen3": _Tiny("Qwen3Config", "Qwen3ForCausalLM", 128, dict(head_dim=128)),
    "tiny-deepseek-v2": _Tiny(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", 192,
        dict(_MLA, first_k_dense_replace=1, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
             moe_intermediate_size=128, topk_method="greedy", n_group=1, topk_group=1),
    ),
    "tiny-deepseek-v2-dense": _Tiny(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", 192,
        dict(_MLA, first_k_dense_replace=2, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
             moe_intermediate_size=128, topk_method="greedy", n_group=1, topk_group=1),
    ),
}
NAMES = (*_TINY_MODELS, "smollm2-hd128")


def make(name: str, directory: str | Path) -> Made:
    """Write checkpoint `name` to `directory` (created; bf16 safetensors, tokenizer).

    Raises ConfigError on an unknown name, a directory that holds another checkpoint, or a missing package.
    """
    if name not in NAMES:
        raise ConfigError(f"model {name!r} is not known; there are {', '.join(NAMES)}")
    path = Path(directory)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not an empty directory; give another")
    require("transformers", "accelerate")
    if name == "smollm2-hd128":
        from zyfa_backend.models import smollm2

        architecture, head_dim = smollm2.write(path)
    else:
        tiny = _TINY_MODELS[name]
        architecture, head_dim = tiny.model, tiny.head_dim
        written(path, lambda: _write_tiny(tiny, path))
    return Made(str(path), architecture, head_dim)


def written(path: Path, write: Callable[[], None]) -> None:
    """Run `write`, and on failure take away the directory it began, so that a later run is not misled by half of one."""
    import shutil

    fresh = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        write()
    except BaseException:
        if fresh:
            shutil.rmtree(path, ignore_errors=True)
        raise


def require(*packages: str) -> None:
    """Raises ConfigError naming the extra that brings a missing package."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"package {package} is missing ({error}); pip install 'zyfa[models]' brings it") from None


def _write_tiny(tiny: _Tiny, path: Path) -> None:
    import torch
    import transformers

    settings = {**_TINY, **tiny.settings}
    config = getattr(transformers, tiny.config)(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = getattr(transformers, tiny.model)(config).to(torch.bfloat16)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)


def _tokenizer():
    """Byte-level BPE of 512 entries, trained on the spot: any text has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from zyfa_backend.compare.text import default_text

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([default_text()[:20000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>")
