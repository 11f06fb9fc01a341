"""A tiny HTTP server with the part of vLLM's API that compare uses, for injecting failures that a real one has rarely.

Started as `fake_vllm.py serve MODEL --port P …`. Its "model" predicts the next byte from the last one alone, by tables
that `distribution` gives to the tests. Environment: FAKE_NOISE perturbs the tables; FAKE_DIE_ONCE, FAKE_DIE, FAKE_HANG
and FAKE_NAN name files, see below; FAKE_START_DELAY, FAKE_STARTS, FAKE_REQUESTS, FAKE_CHILD, FAKE_BOS.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VOCABULARY = 257
BOS = 256
MAX_LEN = 400


def distribution(token: int, noise: float) -> list[float]:
    """Log-probabilities of the token after `token`."""
    clean, extra = random.Random(token), random.Random(-1 - token)
    logits = [2 * clean.gauss(0, 1) + noise * extra.gauss(0, 1) for _ in range(VOCABULARY)]
    total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]


NOISE = float(os.environ.get("FAKE_NOISE", "0"))
TABLE: dict[int, list[float]] = {}


def table(token: int) -> list[float]:
    if token not in TABLE:
        TABLE[token] = distribution(token, NOISE)
    return TABLE[token]


def listed(token: int, actual: int, k: int) -> dict[str, dict[str, float]]:
    row = table(token)
    best = sorted(range(VOCABULARY), key=lambda t: -row[t])[:k]
    return {str(t): {"logprob": row[t], "rank": 1} for t in {actual, *best}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, document: object, status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer({})
        elif self.path == "/version":
            self.answer({"version": "0.32.0"})
        else:
            self.answer({"data": [{"id": "fake", "max_model_len": MAX_LEN}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            special = [BOS] if body["add_special_tokens"] and os.environ.get("FAKE_BOS") else []
            self.answer({"tokens": special + list(body["prompt"].encode())})
            return
        once = os.environ.get("FAKE_DIE_ONCE")
        if os.environ.get("FAKE_DIE") or (once and not os.path.exists(once)):
            if once:
                open(once, "w").close()
            print("(Worker pid=1) ERROR 12-01 21:38:57 [fake.py:1] ValueError: the root of it\nlast words", flush=True)
            os._exit(7)
        if requests := os.environ.get("FAKE_REQUESTS"):
            with open(requests, "a") as stream:
                stream.write(json.dumps({"pid": os.getpid(), "prompt": body["prompt"]}) + "\n")
        if os.environ.get("FAKE_HANG"):
            print("hanging", flush=True)
            time.sleep(600)
        if len(body["prompt"]) + body["max_tokens"] > MAX_LEN:
            self.answer({"error": {"message": "too long for the fake"}}, 400)
        elif "prompt_logprobs" in body:
            ids, k = body["prompt"], body["prompt_logprobs"]
            rows = [None, *(listed(a, b, k) for a, b in zip(ids, ids[1:], strict=False))]
            if os.environ.get("FAKE_NAN"):
                next(iter(rows[5].values()))["logprob"] = float("nan")
            self.answer({"choices": [{"prompt_logprobs": rows}]})
        else:
            self.stream(body["prompt"][-1], body["max_tokens"])

    def stream(self, token: int, count: int) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(count):
            row = table(token)
            token = max(range(VOCABULARY), key=lambda t: row[t])
            self.wfile.write(f"data: {json.dumps({'choices': [{'token_ids': [token]}]})}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


def main() -> None:
    if starts := os.environ.get("FAKE_STARTS"):
        with open(starts, "a") as stream:
            switches = {k: v for k, v in os.environ.items() if k.startswith(("ZYFA_", "VLLM_", "HF_"))}
            stream.write(json.dumps({"pid": os.getpid(), "noise": NOISE, "argv": sys.argv, "env": switches}) + "\n")
    if os.environ.get("FAKE_CHILD"):
        child = subprocess.Popen(["sleep", "600"])
        print(f"child {child.pid}", flush=True)
    time.sleep(float(os.environ.get("FAKE_START_DELAY", "0")))
    if stats := os.environ.get("ZYFA_STATS"):
        if not os.environ.get("FAKE_NO_STATS"):
            for pid, calls in ((1, 30), (2, 12)):
                with open(f"{stats}/stats-{pid}.json", "w") as stream:
                    prefill, decode = {"calls": calls, "tokens": 100}, {"calls": 5, "tokens": 5}
                    json.dump({"pid": pid, "kernels": {"fake/decode": decode, "fake/prefill": prefill}}, stream)
    print("INFO 12-01 21:24:38 [cpu_worker.py:260] fake", flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
