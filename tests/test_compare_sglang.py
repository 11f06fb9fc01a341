"""What compare knows of SGLang without one: commands, variants, and what is read from its answers and log."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from zyfa_backend.compare import engines, sglang
from zyfa_backend.compare.client import ClientError
from zyfa_backend.compare.server import ServerError, server_environment
from zyfa_backend.compare.variants import KNOWN

# Answers of SGLang 0.5.23, cut to what is read; the text's token is among the listed ones at the second position only.
SCORED = {
    "meta_info": {
        "input_token_logprobs": [[None, 20, None], [-6.5, 21, None], [-4.3, 22, None]],
        "input_top_logprobs": [None, [[-3.9, 108, None], [-4.4, 484, None]], [[-3.9, 168, None], [-4.3, 22, None]]],
    }
}
ARGUMENTS = (
    "[2026-12-02 01:58:31] server_args={'model_path': 'm', 'device': '%s', 'attention_backend': %s, "
    "'decode_attention_backend': %s, 'prefill_attention_backend': %s}"
)


class Handler(BaseHTTPRequestHandler):
    asked: list[dict] = []

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.reply(json.dumps({"version": "0.5.23"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body.get("stream"):
            events = [[58], [58, 193], [58, 193, 334]]
            self.reply("".join(f"data: {json.dumps({'output_ids': ids})}\n\n" for ids in events) + "data: [DONE]\n\n")
        else:
            self.reply(json.dumps(SCORED if body.get("return_logprob") else {}))


@pytest.fixture
def client() -> Iterator[sglang.SglangClient]:
    Handler.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sglang.SglangClient(f"http://127.0.0.1:{server.server_port}", timeout_s=10) as made:
            yield made
        server.shutdown()


def test_prompt_log_probabilities(client) -> None:
    scored = client.score([20, 21, 22], top_k=2)
    assert scored.ids.tolist() == [[108, 484, 21], [168, 22, -1]]
    assert np.allclose(scored.actual, [-6.5, -4.3])
    (asked,) = Handler.asked
    assert asked["input_ids"] == [20, 21, 22] and asked["logprob_start_len"] == 0 and asked["top_logprobs_num"] == 2


def test_an_answer_without_them_is_an_error(client) -> None:
    with pytest.raises(ClientError, match="returned no prompt log-probabilities; compare needs a server of SGLang"):
        client.score([20, 21], top_k=2)


def test_times_of_the_first_token_and_the_last(client, monkeypatch) -> None:
    clock = iter([10.0, 10.5, 11.0, 13.0])  # the request, then its three tokens
    monkeypatch.setattr("zyfa_backend.compare.client.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    answer = client.generate([1, 2], max_tokens=3)
    assert (answer.ttft_s, answer.total_s) == (0.5, 3.0)


def test_streamed_tokens_and_requests_that_share_no_prefix(client) -> None:
    assert client.generate([1, 2], max_tokens=3).token_ids == [58, 193, 334]
    client.generate([1, 2], max_tokens=3)
    assert Handler.asked[0]["extra_key"] != Handler.asked[1]["extra_key"]
    assert client.version() == "0.5.23"
    with pytest.raises(ClientError, match="returned 3 of 4 tokens"):
        client.generate([1, 2], max_tokens=4)


def test_backends_and_platform_are_read_from_the_log() -> None:
    cpu = ARGUMENTS % ("cpu", "'torch_native'", "None", "None")
    assert (sglang.attention_backend(cpu), sglang.platform_of(cpu)) == ("torch_native", "cpu")
    pair = ARGUMENTS % ("cuda", "'fa3'", "None", "'zyfa'")
    assert (sglang.attention_backend(pair), sglang.platform_of(pair)) == ("zyfa + fa3", "cuda")
    amd = ARGUMENTS % ("cuda", "'aiter'", "None", "None")
    assert (sglang.attention_backend(amd), sglang.platform_of(amd)) == ("aiter", "rocm")
    assert (sglang.attention_backend(""), sglang.platform_of("")) == ("unknown", "unknown")


def test_the_noise_band_is_another_backend_than_the_baselines() -> None:
    assert sglang.second_baseline("cpu", "torch_native") is sglang.UNQUANTISED
    assert sglang.second_baseline("cuda", "fa3").args == ("--attention-backend", "triton")
    assert sglang.second_baseline("rocm", "aiter").args == ("--attention-backend", "triton")
    assert sglang.second_baseline("cuda", "triton").args == ("--attention-backend", "torch_native")
    assert sglang.UNQUANTISED.uses_zyfa and sglang.UNQUANTISED.name == "baseline2"


def checkpoint(folder, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_of_mla_zyfa_takes_the_prefill_alone(tmp_path) -> None:
    """The absorbed decode and the latent cache are the engine's."""
    (tmp_path / "mla").mkdir()
    mla = checkpoint(tmp_path / "mla", model_type="deepseek_v2", kv_lora_rank=512, num_hidden_layers=2)
    lean = sglang.known(mla)["lean"]
    assert (lean.env, lean.args) == ({"ZYFA_CONFIG": "lean"}, ("--prefill-attention-backend", "zyfa"))
    assert "--kv-cache-dtype" in sglang.known(checkpoint(tmp_path, model_type="qwen3"))["lean"].args


def test_int8_on_a_gpu_is_decoded_by_zyfa(tmp_path, monkeypatch) -> None:
    """The engine's decodes can't read its cache, which the backend refuses at the start."""
    monkeypatch.setattr(sglang, "on_cpu", lambda: False)
    found = sglang.known(checkpoint(tmp_path, model_type="qwen3"))
    prefill, cache = found["lean"].args[:2], found["lean"].args[2:]
    assert prefill == ("--prefill-attention-backend", "zyfa") and cache == ("--kv-cache-dtype", "fp8_e4m3")
    assert found["int8"].args == (*prefill, "--decode-attention-backend", "zyfa", *cache)


@pytest.mark.parametrize("cpu,flag", [(True, "--attention-backend"), (False, "--prefill-attention-backend")])
def test_variants_and_commands(cpu, flag, monkeypatch) -> None:
    monkeypatch.setattr(sglang, "on_cpu", lambda: cpu)
    monkeypatch.setattr(engines, "find_spec", lambda name: object())
    variants = sglang.known("m")
    assert list(variants) == list(KNOWN) and variants["baseline"] is KNOWN["baseline"]
    lean = variants["lean"]
    assert (lean.env, lean.args) == ({"ZYFA_CONFIG": "lean"}, (flag, "zyfa", "--kv-cache-dtype", "fp8_e4m3"))
    command = engines.SGLANG.command("m", lean, ("--dtype", "float32"), 31000, 200, 7)
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", "m"]
    assert command[-6:] == [*lean.args, "--dtype", "float32"]
    assert "--disable-radix-cache" in command and ("--max-total-tokens" in command) == cpu
    environment = server_environment("m", lean.env, {"ZYFA_FALLBACK": "1"}, engines.SGLANG.environment())
    assert environment == {"ZYFA_CONFIG": "lean", **({"SGLANG_USE_CPU_ENGINE": "1"} if cpu else {})}


def test_an_absent_sglang_is_named(monkeypatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match="SGLang is not installed beside this Python"):
        engines.SGLANG.command("m", KNOWN["baseline"], (), 1, 1, 0)
