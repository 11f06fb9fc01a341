"""What compare asks of a server: OpenAI's HTTP API with vLLM's extras (token ids, prompt log-probabilities).

`sglang.py` asks the same of SGLang.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from .metrics import TopK


class ClientError(RuntimeError):
    """A server refused a request, broke off or did not answer in time."""


@dataclass(frozen=True)
class Continuation:
    """Greedy continuation of one prompt. ttft_s, total_s: seconds from sending the request to the first token and to
    the last."""

    token_ids: list[int]
    ttft_s: float
    total_s: float


class Client:
    """One server at `url`. Raises ClientError with the server's own words."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None, seed: int = 0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url
        self.seed = seed
        self.timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=url.removesuffix("/").removesuffix("/v1"),
            timeout=httpx.Timeout(timeout_s, connect=10),
            headers=headers,
            trust_env=False,  # a proxy would add its own time to TTFT
        )
        self._model: dict[str, Any] | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def version(self) -> str:
        """The version of the server's engine, or "unknown" when it does not tell."""
        try:
            return str(self._request("GET", "/version")["version"])
        except (ClientError, KeyError):
            return "unknown"

    @property
    def model(self) -> str:
        return str(self._served()["id"])

    @property
    def max_model_len(self) -> int:
        length = self._served().get("max_model_len")
        if not isinstance(length, int):
            raise ClientError(f"{self.url}/v1/models does not tell max_model_len; compare needs vLLM or SGLang")
        return length

    def _served(self) -> dict[str, Any]:
        if self._model is None:
            models = self._request("GET", "/v1/models").get("data") or []
            if not models:
                raise ClientError(f"{self.url} serves no model")
            self._model = models[0]
        return self._model

    def tokenize(self, text: str, special: bool) -> list[int]:
        answer = self._request(
            "POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": special}
        )
        return list(answer["tokens"])

    def bos(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text (often one, for some models none)."""
        plain, special = self.tokenize("a", special=False), self.tokenize("a", special=True)
        for start in range(len(special) - len(plain) + 1):
            if special[start : start + len(plain)] == plain:
                return special[:start]
        return []

    def score(self, ids: list[int], top_k: int) -> TopK:
        """Log-probabilities that the model gave at positions 1 … len(ids) - 1 of `ids` (from prefill, not decode)."""
        answer = self._request(
            "POST", "/v1/completions", self._body(ids, max_tokens=1, prompt_logprobs=top_k)
        )
        listed = answer["choices"][0].get("prompt_logprobs")
        if not listed or len(listed) != len(ids):
            raise ClientError(f"{self.url} returned no prompt log-probabilities; compare needs a server of vLLM")
        return parse_prompt_logprobs(listed[1:], ids[1:])

    def generate(self, ids: list[int], max_tokens: int) -> Continuation:
        """`max_tokens` greedy tokens after `ids`, streamed; the end-of-text token does not stop it."""
        body = self._body(ids, max_tokens=max_tokens, stream=True, ignore_eos=True, return_token_ids=True)

        def longer(event: dict[str, Any], tokens: list[int]) -> list[int]:
            return [*tokens, *(token for choice in event.get("choices", []) for token in choice.get("token_ids") or [])]

        return self._stream("/v1/completions", body, max_tokens, longer)

    def _stream(
        self,
        path: str,
        body: dict[str, Any],
        max_tokens: int,
        longer: Callable[[dict[str, Any], list[int]], list[int]],
    ) -> Continuation:
        """A streamed completion; `longer` gives all tokens so far for an event and those before it."""
        tokens: list[int] = []
        ttft = total = 0.0
        start = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ClientError(_refusal(f"POST {path}", response))
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ClientError(f"{self.url} broke off: {event['error'].get('message', event['error'])}")
                    before, tokens = len(tokens), longer(event, tokens)
                    if len(tokens) > before:
                        total = time.perf_counter() - start
                        ttft = ttft or total
        except httpx.TimeoutException as error:
            raise ClientError(f"{self.url} sent nothing for {self.timeout_s:g} s during a completion") from error
        except httpx.HTTPError as error:
            raise ClientError(f"{self.url} broke off a completion: {error or type(error).__name__}") from error
        if len(tokens) != max_tokens:
            raise ClientError(f"{self.url} returned {len(tokens)} of {max_tokens} tokens")
        return Continuation(tokens, ttft, total)

    def _body(self, ids: list[int], **extra: Any) -> dict[str, Any]:
        # A fresh salt keeps every request out of another's cached prefix, also on a server that caches prefixes.
        return {
            "model": self.model,
            "prompt": ids,
            "temperature": 0,
            "seed": self.seed,
            "cache_salt": uuid.uuid4().hex,
            **extra,
        }

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.ConnectError as error:
            raise ClientError(f"no server answers at {self.url}") from error
        except httpx.TimeoutException as error:
            raise ClientError(f"{self.url} did not answer {method} {path} within {self.timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClientError(f"{self.url} broke off {method} {path}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise ClientError(_refusal(f"{method} {path}", response))
        try:
            return response.json()
        except ValueError as error:
            raise ClientError(f"{self.url} answered {method} {path} with something that is not JSON") from error


def _refusal(request: str, response: httpx.Response) -> str:
    text = response.text
    try:
        text = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        pass
    return f"{request} was refused with HTTP {response.status_code}: {text[:500].strip() or 'no reason given'}"


def parse_prompt_logprobs(listed: list[dict[str, dict[str, Any]]], actual: list[int]) -> TopK:
    """vLLM's `prompt_logprobs` (one mapping of token id to logprob per position) as arrays.

    The text's own token is listed even when it is not among the k most likely, so a row has k or k + 1 entries.
    Raises ClientError when a value is NaN or null.
    """
    width = max(len(entry) for entry in listed)
    ids = np.full((len(listed), width), -1, dtype=np.int32)
    logprobs = np.full((len(listed), width), -np.inf, dtype=np.float32)
    chosen = np.empty(len(listed), dtype=np.float32)
    for row, (entry, token) in enumerate(zip(listed, actual, strict=True)):
        if any(value["logprob"] is None or value["logprob"] != value["logprob"] for value in entry.values()):
            raise ClientError(f"the server returned a log-probability that is not a number at position {row + 1}")
        ranked = sorted(((float(value["logprob"]), -int(key)) for key, value in entry.items()), reverse=True)
        ids[row, : len(ranked)] = [-key for _, key in ranked]
        logprobs[row, : len(ranked)] = [logprob for logprob, _ in ranked]
        chosen[row] = entry[str(token)]["logprob"]
    return TopK(ids, logprobs, chosen)
