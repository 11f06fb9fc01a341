"""Run as a script: starts vLLM's engine on models that ZYFA does not serve and prints what each came to, as JSON.

    python -m tests.engine.refusal_probe DIRECTORY

Weights are random (`load_format="dummy"`): only the configuration decides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Arguments of an engine, where they decide beside the model's configuration.
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
ENGINE = {"speculation": {"speculative_config": SPECULATIVE}}


def configurations() -> dict:
    from transformers import BertConfig, BloomConfig, Gemma2Config, GptOssConfig, MistralConfig

    small = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=512)
    return {
        "soft cap": ("Gemma2ForCausalLM", Gemma2Config(**small, head_dim=128, attn_logit_softcapping=50.0)),
        "ALiBi": ("BloomForCausalLM", BloomConfig(vocab_size=512, hidden_size=256, n_layer=2, n_head=2)),
        "sinks": ("GptOssForCausalLM", GptOssConfig(**small, head_dim=64, num_local_experts=2, num_experts_per_tok=1,
                                                    layer_types=["full_attention"] * 2)),
        "head size 80": ("MistralForCausalLM", MistralConfig(**small, head_dim=80, sliding_window=None)),
        "speculation": ("MistralForCausalLM", MistralConfig(**small, head_dim=128, sliding_window=None)),
        "encoder": ("BertModel", BertConfig(vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
                                            intermediate_size=512, max_position_embeddings=512)),
    }


def save_tokenizer(path: Path) -> None:
    """A tokenizer that an engine can load; no text is ever given to it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1").save_pretrained(path)


def attempt(path: Path, architecture: str, config, engine: dict) -> dict:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    import zyfa_backend

    config.architectures = [architecture]
    config.dtype = "bfloat16"
    config.save_pretrained(path)
    decoder = architecture.endswith("CausalLM")
    if not decoder:
        save_tokenizer(path)
    zyfa_backend.counters.reset()
    try:
        llm = LLM(
            str(path), load_format="dummy", skip_tokenizer_init=decoder, enforce_eager=True, max_model_len=128, **engine
        )
        if decoder:
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
            answer = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0]
            tokens = len(answer.outputs[0].token_ids)
        else:
            tokens = len(llm.embed([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False))
        del llm
        return {"started": True, "tokens": tokens, "kernels": zyfa_backend.counters.snapshot()["kernels"]}
    except Exception as error:
        return {"started": False, "error": f"{type(error).__name__}: {error}"}
    finally:
        torch.manual_seed(0)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    root, only = Path(sys.argv[1]), sys.argv[2:]
    found = {}
    for name, (architecture, config) in configurations().items():
        if not only or name in only:
            found[name] = attempt(root / name.replace(" ", "-"), architecture, config, ENGINE.get(name, {}))
    print("RESULT " + json.dumps(found))
