"""`zyfa doctor`: what runs here, what does not and why, and what would be faster."""

from __future__ import annotations

from typing import Any

import typer

from zyfa_backend.commands.common import Json, print_json


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(json: Json = False) -> None:
    """Report versions, devices, engines, kernels and switches: what runs here, and what would be faster."""
    from zyfa_backend.doctor import examine

    report = examine()
    if json:
        print_json(report)
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 120
    print("Versions:  " + ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version))
    absent = [name for name, version in report["versions"].items() if not version]
    print(f"Absent:    {', '.join(absent) or 'nothing'}")
    cpu = report["device"]["cpu"]
    features = " ".join(("+" if present else "-") + name for name, present in cpu["features"].items())
    print(f"CPU:       {cpu['name']}, {cpu['cores']} cores, {features}")
    for gpu in report["device"]["gpus"]:
        print(f"GPU:       {gpu['name']} ({gpu['architecture']}), {gpu['memory_gib']:g} GiB")
    if not report["device"]["gpus"]:
        print("GPU:       none that torch sees")
    for engine in report["engines"]:
        if engine["installed"] is None:
            print(f"Engine:    {engine['name']} is not installed (supported: {engine['supported']})")
        else:
            state = "ready" if engine["ready"] else "not ready"
            on = f" on {engine['device']}" if engine["device"] else ""
            print(f"Engine:    {engine['name']} {engine['installed']}{on}: {state} (supported: {engine['supported']})")
        for problem in engine["problems"]:
            print(f"           - {problem}")
    table = Table("kernel", "runs here", "why")
    for kernel in report["kernels"]:
        table.add_row(kernel["name"], "yes" if kernel["available"] else "no", kernel["reason"])
    console.print(table)
    table = Table("switch", "value", "what it does, or would do")
    for switch in report["switches"]:
        table.add_row(switch["name"], "—" if switch["value"] is None else switch["value"], switch["note"])
    console.print(table)
