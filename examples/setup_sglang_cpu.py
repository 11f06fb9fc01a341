#!/usr/bin/env python3
"""Create a virtual environment that serves SGLang with ZYFA on a CPU.

    python3 examples/setup_sglang_cpu.py [--venv .venv-sglang] [--extras models,test]

An environment of its own, since SGLang pins other versions than vLLM. Needs nothing but Python 3.11 or 3.12 with its
venv module. Every step looks at what is there first, so running it again is cheap and repairs what is missing.

SGLang's wheel is for GPUs: it is installed without its dependencies, then those of them that need no GPU. Two repairs
follow, as a small distribution of their own: torchvision's operators are declared, which its library, built for CUDA,
does not do beside a CPU torch; and the names of SGLang's GPU kernels exist, so that they can be imported.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

from setup_common import ROOT, WEIGHTS, environment, install_wheel, once, pip_install, run, run_steps, versions

SGLANG = "0.5.23"
TORCH = "torch==2.13.0+cpu"
TORCHVISION = "torchvision==0.28.0"
# Requirements of SGLang that drive a GPU, or bring another torch along.
GPU = (
    "cuda-python", "flash-attn-4", "flashinfer-python", "humming-kernels", "kernels", "nvidia-cutlass-dsl",
    "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm",
    "sgl-flash-mla", "sglang-kernel", "smg-grpc-servicer", "tilelang", "torch", "torch-memory-saver", "torchaudio",
    "torchcodec", "torchvision",
)
REPAIRS = "zyfa-sglang-cpu"
REPAIRS_VERSION = "1"
SCHEMAS = '''"""Declares torchvision's operators when it is imported: its library, for CUDA, does not load here."""

import sys

_kept = []


class _Schemas:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
        return None


sys.meta_path.insert(0, _Schemas())
'''
KERNELS = '''"""Names of SGLang's GPU kernels: each can be imported, and calling one says that there is no GPU."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a GPU kernel; this environment was made for a CPU")

    return absent
'''


def engine(python: str) -> str:
    """Install SGLang and torchvision without what they depend on, after a torch for CPUs."""
    have = versions(python, "sglang", "torch", "torchvision")
    if have["sglang"] == SGLANG and have["torch"] == TORCH.split("==")[1] and have["torchvision"].startswith("0.28.0"):
        return f"SGLang {SGLANG} is there"
    pip_install(python, TORCH)
    pip_install(python, "--no-deps", f"sglang=={SGLANG}", TORCHVISION)
    return f"SGLang {SGLANG}, {TORCH}"


def requirements(python: str) -> list[str]:
    """What the installed SGLang requires here and needs no GPU."""
    code = f"""
import importlib.metadata as m
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
for text in m.requires("sglang"):
    requirement = Requirement(text)
    if requirement.marker is None or requirement.marker.evaluate({{"extra": ""}}):
        if canonicalize_name(requirement.name) not in {GPU!r}:
            requirement.marker = None
            print(requirement)
"""
    return run([python, "-c", code]).split("\n")


def packages(python: str, extras: str, stamp: pathlib.Path) -> str:
    """Install SGLang's requirements, ZYFA with its extras and the weights; torch stays what it is."""

    def install() -> None:
        with tempfile.TemporaryDirectory() as folder:
            pins, wanted = pathlib.Path(folder, "pins.txt"), pathlib.Path(folder, "requirements.txt")
            pins.write_text(f"{TORCH}\n")
            wanted.write_text("\n".join(requirements(python)))
            project = f"{ROOT}[{extras}]" if extras else str(ROOT)
            pip_install(python, "--constraint", str(pins), "--requirement", str(wanted), "--editable", project)
        pip_install(python, "--no-deps", WEIGHTS)

    return once(stamp, {"extras": extras, "sglang": SGLANG, "gpu": GPU}, install)


def repairs(python: str) -> str:
    """Install the two repairs."""
    if versions(python, REPAIRS)[REPAIRS] == REPAIRS_VERSION:
        return "are there"
    files = {
        "zyfa_sglang_cpu.py": SCHEMAS,
        "zyfa_sglang_cpu.pth": "import zyfa_sglang_cpu\n",
        "sgl_kernel/__init__.py": KERNELS,
    }
    install_wheel(python, REPAIRS, REPAIRS_VERSION, "lets SGLang be imported on a CPU", files)
    return "done"


def loads(python: str) -> str:
    """Load SGLang with the plugin, as a server would."""
    code = """
import os
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.platforms import current_platform
print(type(current_platform).__name__, "knows", *(name for name in ATTENTION_BACKEND_CHOICES if name == "zyfa"))
"""
    return run([python, "-c", code]).strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", default=str(ROOT / ".venv-sglang"), help="where it goes (default: .venv-sglang)")
    parser.add_argument("--extras", default="models", help="extras of the zyfa package (default: models)")
    arguments = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        sys.exit(f"this is Python {sys.version.split()[0]}; SGLang's wheel and torch's for CPUs are for 3.11 and 3.12")
    venv = pathlib.Path(arguments.venv).absolute()
    python = str(venv / "bin" / "python")
    run_steps(
        (
            ("create the environment", lambda: environment(venv)),
            ("install SGLang and torch for CPUs", lambda: engine(python)),
            ("install what SGLang needs without a GPU, ZYFA and a small model (minutes, 3 GB)",
             lambda: packages(python, arguments.extras, venv / "zyfa-setup.json")),
            ("repair what its wheels expect of a GPU", lambda: repairs(python)),
            ("load SGLang with the plugin", lambda: loads(python)),
        )
    )


if __name__ == "__main__":
    main()
