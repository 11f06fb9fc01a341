"""Wrong arguments give an error that names the value and what is accepted."""

from __future__ import annotations

import pytest
import torch

from tests.attention_cases import inputs, operands
from zyfa_backend import reference
from zyfa_backend.config import INT8, LEAN, UNQUANTIZED, AttentionConfig, ConfigError
from zyfa_backend.quantization import Quantized
from zyfa_backend.reference import AttentionError
from zyfa_backend.rotation import RotationError


def attention(**changes):
    q, k, v = inputs(10, 4, 2)
    call = {"q": q, "k": k, "v": v, "softmax_scale": 0.1, **changes}
    return reference.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"q": torch.zeros(10, 128)}, r"q has shape \[10, 128\]; expected \[tokens, heads, channels\]"),
        ({"k": torch.zeros(9, 2, 128)}, r"k has shape \[9, 2, 128\] and v \[10, 2, 128\]"),
        ({"q": torch.zeros(10, 4, 64)}, "q has 64 channels and k 128"),
        ({"q": torch.zeros(10, 3, 128)}, "3 query heads are not a positive multiple of 2"),
        ({"softmax_scale": 0.0}, "softmax_scale=0.0 is not accepted; it is positive and finite"),
        ({"softmax_scale": float("nan")}, "softmax_scale=nan"),
        ({"window": -1}, "window=-1 is not accepted"),
        ({"window": 1.5}, "window=1.5 is not accepted"),
        ({"cu_seqlens_q": torch.tensor([0, 4])}, r"cu_seqlens_q is \[0, 4\]; expected offsets that rise from 0 to 10"),
        ({"cu_seqlens_k": torch.tensor([0, 7, 3, 10])}, "cu_seqlens_k is"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 10])}, "cu_seqlens_q has 1 sequences and cu_seqlens_k 2"),
        ({"k_scale": torch.ones(3)}, "scale"),
    ],
)
def test_attention(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**changes)


def test_head_dimension_without_a_rotation() -> None:
    q = torch.zeros(3, 1, 80)
    with pytest.raises(RotationError, match="80; accepted: 64, 96, 128, 192"):
        attention(q=q, k=q, v=q)
    out, _ = attention(q=q, k=q, v=q, config=UNQUANTIZED)
    assert out.shape == (3, 1, 80)


def test_attend_checks_scales() -> None:
    q, k, v = operands(*inputs(10, 4, 2), LEAN)
    call = {"softmax_scale": 0.1, "causal": True, "config": LEAN, "out_dtype": torch.bfloat16}
    with pytest.raises(AttentionError, match=r"the scale of q has shape \[4\]; expected \[10, 4\]"):
        reference.attend(Quantized(q.data, torch.ones(4), q.format), k, v, **call)
    with pytest.raises(AttentionError, match=r"the scale of v has shape \[4\]; expected a scalar or \[2\]"):
        reference.attend(q, k, Quantized(v.data, torch.ones(4), v.format), **call)


def decode(**changes):
    call = {
        "q": torch.zeros(2, 4, 128), "k": torch.zeros(6, 16, 2, 128, dtype=torch.uint8), "config": LEAN,
        "table": torch.zeros(2, 3, dtype=torch.int32), "lens": torch.tensor([5, 48]), "q_len": 1, **changes,
    }  # fmt: skip
    v = call.get("v", torch.zeros(6, 16, 2, 128, dtype=torch.uint8))
    return reference.decode(
        call["q"], call["k"], v, call["table"], call["lens"], k_scale=call.get("k_scale", 1.0), v_scale=1.0,
        softmax_scale=0.1, config=call["config"], q_len=call["q_len"], window=call.get("window"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"k": torch.zeros(6, 16, 2, 128)}, "k_cache has dtype torch.float32; format fp8_e4m3 is stored as torch.u"),
        ({"config": UNQUANTIZED}, "k_cache has dtype torch.uint8; format none is stored in a floating dtype"),
        ({"v": torch.zeros(6, 8, 2, 128, dtype=torch.uint8)}, "k_cache has shape"),
        ({"q": torch.zeros(3, 4, 128)}, "q has 3 rows"),
        ({"lens": torch.tensor([5])}, "seq_lens 1"),
        ({"lens": torch.tensor([5, 49])}, "seq_lens holds 49; accepted: from q_len = 1 to the 48 tokens"),
        ({"lens": torch.tensor([0, 4])}, "seq_lens holds 0"),
        ({"q_len": 0}, "q_len=0 is not accepted"),
        ({"window": -3}, "window=-3"),
        ({"q": torch.zeros(2, 3, 128)}, "3 query heads"),
        ({"k_scale": torch.ones(5)}, r"the scale of k has shape \[5\]; expected a scalar or \[2\]"),
    ],
)
def test_decode(changes: dict, message: str) -> None:
    with pytest.raises(AttentionError, match=message):
        decode(**changes)


def test_decode_takes_int8_as_bytes_of_either_type() -> None:
    for dtype in (torch.uint8, torch.int8):
        out, _ = decode(config=INT8, k=torch.ones(6, 16, 2, 128, dtype=dtype))
        assert out.shape == (2, 4, 128)


def test_merge_states() -> None:
    out, lse = torch.zeros(5, 2, 8), torch.zeros(2, 5)
    with pytest.raises(AttentionError, match=r"lse \[5, 2\] and \[2, 5\]; expected \[T, H, Dv\] twice and \[H, T\]"):
        reference.merge_states(out, lse.T, out, lse)


@pytest.mark.parametrize(
    "changes", [{"offset": 9.0}, {"delta": 2.0}, {"tile": 32}, {"rotation": "walsh"}, {"qk_format": "int4"}]
)
def test_config(changes: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}=.* is not accepted"):
        AttentionConfig(**changes)
