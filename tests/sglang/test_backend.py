"""Extend and decode over SGLang's pools, against fp64 on what the pool holds."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import zyfa_backend
from tests.sglang.codec import decode, encode, quantized_query, rotated
from tests.sglang.rig import FP8, Rig, attention, error, layer_name
from zyfa_backend import scales
from zyfa_backend.config import LEAN, PRESETS

# What rounding P may cost: lean P over keys as peaked as these; bf16 results otherwise.
BOUND = {FP8: 0.02, torch.bfloat16: 0.004}
# A single row may be as far off as a code of P is from the next.
ROW_BOUND = {FP8: 1 / 16, torch.bfloat16: 0.004}
PREFIXES, NEW = (0, 5, 64, 200, 130), (1, 63, 64, 65, 127)


@pytest.fixture(autouse=True)
def counted() -> None:
    zyfa_backend.counters.reset()


def scale_file(folder, heads: int, layers: int = 1, config=LEAN) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """A ZYFA_SCALES file in which every scale differs, with the scales of K and of V."""
    k = [torch.tensor([0.011 * (1 + i + 3 * n) for i in range(heads)]) for n in range(layers)]
    v = [torch.tensor([0.019 * (1 + i + 2 * n) for i in range(heads)]) for n in range(layers)]
    held = {}
    for index in range(layers):
        held[layer_name(index)] = scales.LayerScales(heads)
        held[layer_name(index)].fix(k[index], v[index], "test")
    path = str(folder / "scales.safetensors")
    scales.write(path, held, config)
    return path, k, v


def stored(rig: Rig, row: int, length: int, k_scale, v_scale, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K (rotated where the pool holds it so) and V of a request as the pool holds them, fp64."""
    k, v = rig.bytes_of(row, length, layer)
    if k.dtype != FP8:
        return k.double(), v.double()
    return decode(k) * k_scale[:, None].double(), decode(v) * v_scale[:, None].double()


def expected(rig: Rig, q, k, v, window=None) -> torch.Tensor:
    query = quantized_query(q) if rig.pool.dtype == FP8 else q
    return attention(query, k, v, rig.dim**-0.5, window)


@pytest.mark.parametrize("cache", [FP8, torch.bfloat16], ids=["fp8", "bf16"])
def test_ragged_extend_over_prefixes_then_decode(cache, device, tmp_path, monkeypatch) -> None:
    path, k_scale, v_scale = scale_file(tmp_path, heads=2)
    if cache == FP8:
        monkeypatch.setenv("ZYFA_SCALES", path)
    rig = Rig(cache, device=device)
    rows = [rig.request() for _ in NEW]
    tokens = [rig.tensors(a + b + 1, seed) for seed, (a, b) in enumerate(zip(PREFIXES, NEW, strict=True))]

    def cut(start, stop):
        parts = [[x[a:b] for x in held] for held, a, b in zip(tokens, start, stop, strict=True)]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    whole = [a + b for a, b in zip(PREFIXES, NEW, strict=True)]
    first = [n for n, length in enumerate(PREFIXES) if length]
    q, k, v = cut([0] * 5, PREFIXES)
    rig.run(rig.extend([rows[n] for n in first], [0] * len(first), [PREFIXES[n] for n in first]), q, k, v)
    q, k, v = cut(PREFIXES, whole)
    out = rig.run(rig.extend(rows, PREFIXES, NEW), q, k, v)
    for row, length, part, query in zip(rows, whole, out.split(NEW), q.split(NEW), strict=True):
        held = stored(rig, row, length, k_scale[0], v_scale[0])
        assert error(part.cpu(), expected(rig, query, *held)) < (BOUND if part.shape[0] > 1 else ROW_BOUND)[cache]
    q, k, v = cut(whole, [length + 1 for length in whole])
    out = rig.run(rig.decode(rows, whole), q, k, v)
    for n, row in enumerate(rows):
        held = stored(rig, row, whole[n] + 1, k_scale[0], v_scale[0])
        assert error(out[n : n + 1].cpu(), expected(rig, q[n : n + 1], *held)) < ROW_BOUND[cache]
    kernels = zyfa_backend.counters.snapshot()["kernels"]
    stem, tail = ("fp8", "-lean") if cache == FP8 else ("bf16", "")
    stem = f"{'torch' if device == 'cpu' else 'triton'}/{stem}"
    assert kernels[f"{stem}-hd128-causal{tail}"] == {"calls": 2, "tokens": sum(whole)}
    assert kernels[f"{stem}-hd128-decode{tail}"] == {"calls": 1, "tokens": 5}


def test_the_pool_holds_rotated_k_and_v_by_the_specification(device, tmp_path, monkeypatch) -> None:
    path, k_scale, v_scale = scale_file(tmp_path, heads=2)
    monkeypatch.setenv("ZYFA_SCALES", path)
    rig = Rig(device=device)
    row = rig.request()
    q, k, v = rig.tensors(70)
    kept = [x.clone() for x in (q, k, v)]
    rig.run(rig.extend([row], [0], [70]), q, k, v)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), kept, strict=True)), "the caller's tensors changed"
    k_bytes, v_bytes = (x.view(torch.uint8).cpu() for x in rig.bytes_of(row, 70))
    assert torch.equal(v_bytes, encode(v.double().cpu() / v_scale[0][:, None].double()))
    # A rotated value that lies within fp32 rounding of a tie may take the neighbouring code.
    want = encode(rotated(k) / k_scale[0][:, None].double())
    assert (k_bytes != want).float().mean() < 1e-3
    assert (decode(k_bytes) - decode(want)).abs().max() <= decode(want).abs().max() / 8
    free = torch.ones(rig.pool.size + 1, dtype=torch.bool)
    free[rig.slots_of(row, 70).cpu()] = False
    for buffer in rig.pool.get_kv_buffer(0):
        assert not buffer.view(torch.uint8).cpu()[free].any(), "a slot of nobody was written"


def test_chunks_and_a_cached_prefix_give_the_bits_of_the_whole(device, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    rig = Rig(device=device)
    q, k, v = rig.tensors(300)
    whole = rig.run(rig.extend([rig.request()], [0], [300]), q, k, v)
    row, before, parts = rig.request(), 0, []
    for size in (1, 63, 100, 136):
        part = slice(before, before + size)
        parts.append(rig.run(rig.extend([row], [before], [size]), q[part], k[part], v[part]))
        before += size
    assert torch.equal(torch.cat(parts), whole)
    # A second request that shares the first's slots, as a hit in the radix cache does.
    other = rig.request()
    rig.requests.req_to_token[other, :200] = rig.requests.req_to_token[row, :200]
    hit = rig.run(rig.extend([other], [200], [100]), q[200:], k[200:], v[200:])
    assert torch.equal(hit, whole[200:])


def test_mixed_batch_equals_its_parts(device, tmp_path, monkeypatch) -> None:
    """With chunked prefill SGLang puts decoding requests into an extend batch, one token each."""
    monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    rig = Rig(device=device)
    q, k, v = rig.tensors(150, 1)
    q2, k2, v2 = rig.tensors(91, 2)
    alone, twin = rig.request(), rig.request()
    for row in (alone, twin):
        rig.run(rig.extend([row], [0], [149]), q[:149], k[:149], v[:149])
    decoded = rig.run(rig.decode([twin], [149]), q[149:], k[149:], v[149:])
    extended = rig.run(rig.extend([rig.request()], [0], [91]), q2, k2, v2)
    pairs = ((q2, q[149:]), (k2, k[149:]), (v2, v[149:]))
    batch = rig.extend([rig.request(), alone], [0, 149], [91, 1], ForwardMode.MIXED)
    mixed = rig.run(batch, *(torch.cat(pair) for pair in pairs))
    assert torch.equal(mixed[:91], extended)
    # Decode sums the same blocks in another order.
    assert error(mixed[91:], decoded) < 0.005


@pytest.mark.parametrize("q_heads,kv_heads", [(2, 2), (4, 2), (3, 1), (12, 4), (8, 1), (9, 3)])
@pytest.mark.parametrize("cache", [FP8, torch.bfloat16], ids=["fp8", "bf16"])
def test_groups_of_query_heads(q_heads, kv_heads, cache, device) -> None:
    rig = Rig(cache, q_heads, kv_heads, device=device)
    row = rig.request()
    q, k, v = rig.tensors(131)
    out = rig.run(rig.extend([row], [0], [130]), q[:130], k[:130], v[:130])
    last = rig.run(rig.decode([row], [130]), q[130:], k[130:], v[130:])
    served = rig.backend.served(rig.model.attention(0))
    held = stored(rig, row, 131, served.scales.k.cpu(), served.scales.v.cpu())
    assert error(torch.cat([out, last]).cpu(), expected(rig, q, *held)) < BOUND[cache]


@pytest.mark.parametrize("window_layers", [(), (1,)], ids=["one pool", "a pool for window layers"])
@pytest.mark.parametrize("cache", [FP8, torch.bfloat16], ids=["fp8", "bf16"])
def test_sliding_window(cache, window_layers, device, tmp_path, monkeypatch) -> None:
    """Layer 1 sees 64 keys before each query, layer 0 all of them; prompts longer than the window, extended twice."""
    path, k_scale, v_scale = scale_file(tmp_path, heads=2, layers=2)
    if cache == FP8:
        monkeypatch.setenv("ZYFA_SCALES", path)
    rig = Rig(cache, windows=(-1, 64), window_layers=window_layers, device=device)
    row = rig.request()
    q, k, v = rig.tensors(301)
    outs: list[list[torch.Tensor]] = [[], []]
    for start, stop in ((0, 170), (170, 300), (300, 301)):
        batch = rig.extend([row], [start], [stop - start]) if stop < 301 else rig.decode([row], [start])
        for layer in (0, 1):
            outs[layer].append(rig.run(batch, q[start:stop], k[start:stop], v[start:stop], layer))
    for layer, window in ((0, None), (1, 64)):
        held = stored(rig, row, 301, k_scale[layer], v_scale[layer], layer)
        assert error(torch.cat(outs[layer]).cpu(), expected(rig, q, *held, window)) < BOUND[cache]
    # The two layers really differ by their window.
    assert error(outs[1][1], outs[0][1]) > 0.05


@pytest.mark.parametrize("cache", [FP8, torch.bfloat16], ids=["fp8", "bf16"])
def test_without_saving_nothing_is_written_and_the_new_tokens_take_part(cache, device, tmp_path, monkeypatch) -> None:
    if cache == FP8:
        monkeypatch.setenv("ZYFA_SCALES", scale_file(tmp_path, heads=2)[0])
    rig = Rig(cache, device=device)
    row, twin = rig.request(), rig.request()
    q, k, v = rig.tensors(151)
    for name in (row, twin):
        rig.run(rig.extend([name], [0], [100]), q[:100], k[:100], v[:100])
    before = [x.view(torch.uint8).clone() for x in rig.pool.get_kv_buffer(0)]
    unsaved = rig.run(rig.extend([row], [100], [50]), q[100:150], k[100:150], v[100:150], save_kv_cache=False)
    assert all(torch.equal(x.view(torch.uint8), y) for x, y in zip(rig.pool.get_kv_buffer(0), before, strict=True))
    saved = rig.run(rig.extend([twin], [100], [50]), q[100:150], k[100:150], v[100:150])
    assert torch.equal(unsaved, saved)
    one = rig.run(rig.decode([twin], [150]), q[150:], k[150:], v[150:], save_kv_cache=False)
    again = rig.run(rig.decode([twin], [150]), q[150:], k[150:], v[150:])
    assert error(one, again) < 0.005


def test_without_k_and_v_all_is_read_from_the_pool(device) -> None:
    """A layer that shares another's cache brings only its queries."""
    rig = Rig(device=device)
    row = rig.request()
    q, k, v = rig.tensors(150)
    batch = rig.extend([row], [0], [150])
    want = rig.run(batch, q, k, v)
    assert torch.equal(rig.run(batch, q, None, None), want)


@pytest.mark.parametrize("preset", ["exact", "lean", "lean-no-rotation", "int8"])
def test_weights_sum_to_one(preset, device, monkeypatch) -> None:
    """V = 1 gives exactly 1 for peaked rows, from extend and from decode, in every preset."""
    monkeypatch.setenv("ZYFA_CONFIG", preset)
    rig = Rig(device=device)
    row = rig.request()
    q, k, _ = rig.tensors(700)
    v = torch.ones(700, 2, 128, dtype=torch.bfloat16, device=device)
    rig.backend.served(rig.model.attention(0)).scales.fix(torch.tensor(0.1), torch.tensor(0.5), "test")
    out = rig.run(rig.extend([row], [0], [699]), 3 * q[:699], k[:699], v[:699])
    last = rig.run(rig.decode([row], [699]), 3 * q[699:], k[699:], v[699:])
    assert torch.equal(out, torch.ones_like(out)) and torch.equal(last, torch.ones_like(last))


@pytest.mark.parametrize("preset", ["exact", "lean-no-rotation", "int8"])
def test_presets_agree_with_attention_on_the_same_tokens(preset, device, monkeypatch) -> None:
    """One prefill through the pool gives the bits of `zyfa_backend.attention` with the pool's scales.

    On a GPU, where that is torch's reference beside the Triton kernels, what a few codes of P make of them.
    """
    monkeypatch.setenv("ZYFA_CONFIG", preset)
    rig = Rig(device=device)
    q, k, v = rig.tensors(200)
    out = rig.run(rig.extend([rig.request()], [0], [200]), q, k, v)
    held = rig.backend.served(rig.model.attention(0)).scales
    want, _ = zyfa_backend.attention(
        q, k, v, softmax_scale=128**-0.5, config=PRESETS[preset], k_scale=held.k, v_scale=held.v
    )
    assert held.frozen and held.source == "calibrated"
    assert torch.equal(out, want) if device == "cpu" else error(out, want) < 0.01


def test_made_up_tokens_do_not_calibrate(device) -> None:
    """Warm-up passes of the engine write to slot 0."""
    rig = Rig(device=device)
    q, k, v = rig.tensors(140)
    batch = rig.extend([rig.request()], [0], [140])
    real = batch.out_cache_loc
    batch.out_cache_loc = torch.zeros_like(real)
    rig.run(batch, 100 * q, 100 * k, 100 * v)
    held = rig.backend.served(rig.model.attention(0)).scales
    assert not held.frozen
    batch.out_cache_loc = real
    rig.run(batch, q, k, v)
    # Twice the largest value in reach, by the headroom of FP8.
    assert held.frozen
    assert torch.allclose(held.k.cpu().double(), rotated(k).abs().amax((0, 2)) * 2 / 448, rtol=1e-5)
    assert torch.allclose(held.v, v.float().abs().amax((0, 2)) * 2 / 448)


def test_the_first_tokens_get_provisional_scales_and_are_rescaled(device) -> None:
    """The server's warm-up and short prompts come first; scales are final after 128 tokens of them all."""
    rig = Rig(device=device)
    held = rig.backend.served(rig.model.attention(0)).scales
    rows = [rig.request() for _ in range(4)]
    inputs = [rig.tensors(length, seed) for seed, length in enumerate((6, 60, 50, 30))]
    inputs[2][1].mul_(3)
    for row, (q, k, v), frozen in zip(rows, inputs, (False, False, False, True), strict=True):
        out = rig.run(rig.extend([row], [0], [q.shape[0]]), q, k, v)
        assert held.frozen is frozen
        # Whatever the scales are, those that the pool's codes have are those that they are read by.
        want = expected(rig, q, *stored(rig, row, q.shape[0], held.k.cpu(), held.v.cpu()))
        assert error(out.cpu(), want) < BOUND[FP8]
    # Final ones: the largest of all 146 tokens with the headroom of FP8, as if they had come at once.
    turned = torch.cat([rotated(k) for _, k, _ in inputs])
    assert torch.allclose(held.k.cpu().double(), turned.abs().amax((0, 2)) * 2 / 448, rtol=1e-5)
    for row, (_, k, v) in zip(rows, inputs, strict=True):
        k_held, v_held = stored(rig, row, k.shape[0], held.k.cpu(), held.v.cpu())
        # A code of e4m3 is off by 2.6% rms, one that was rounded twice by at most twice that.
        assert error(k_held, rotated(k)) < 0.052 and error(v_held, v.cpu()) < 0.052


def test_health_checks_do_not_count(device) -> None:
    """However often a server is asked whether it is alive, by one and the same token."""
    rig = Rig(device=device)
    q, k, v = rig.tensors(1)
    row = rig.request()
    for number in range(130):
        batch = rig.extend([row], [0], [1])
        batch.rids = [f"HEALTH_CHECK_{number}"]
        rig.run(batch, q, k, v)
    held = rig.backend.served(rig.model.attention(0)).scales
    assert not held.frozen
    want = rotated(k), v.cpu()
    for _ in range(2):
        for kept, true in zip(stored(rig, row, 1, held.k.cpu(), held.v.cpu()), want, strict=True):
            assert error(kept, true) < 0.06
        q2, k2, v2 = rig.tensors(140, 1)
        rig.run(rig.extend([rig.request()], [0], [140]), q2, k2, v2)
        assert held.frozen
    assert torch.allclose(held.k.cpu().double(), rotated(k2).abs().amax((0, 2)) * 2 / 448, rtol=1e-5)


@pytest.mark.unquantised
def test_padding_behind_the_batch_gives_zeros(device) -> None:
    rig = Rig(torch.bfloat16, device=device)
    q, k, v = rig.tensors(80)
    batch = rig.extend([rig.request()], [0], [64])
    rig.backend.init_forward_metadata(batch)
    out = rig.backend.forward_extend(q.flatten(1), k, v, rig.model.attention(0), batch)
    assert out.shape == (80, 4 * 128) and not out[64:].any()
    assert error(out[:64].view(64, 4, 128).cpu(), attention(q[:64], k[:64], v[:64], 128**-0.5).cpu()) < 0.004
