"""Runs of the fp8 kernels on the emulator, for tests: packed sequences, any strides, delayed memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from zyfa_backend import kernel_devices, kernel_run, reference


def name(causal: bool, lean: bool) -> str:
    return f"fp8-hd128-{'causal' if causal else 'full'}-{'lean' if lean else 'exact'}"


def launch(
    problems: list[kernel_run.Problem], *, delayed: bool = False, window: int | None = None, **options
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """`kernel_devices.launch` on a fresh emulator; delayed: memory takes its time."""
    first = problems[0]
    which = name(first.causal, first.config.probabilities == "lean")
    device = kernel_devices.EmulatorDevice(kernel_devices.loaded(which), delayed)
    return kernel_devices.launch(device, which, [replace(first, window=window), *problems[1:]], **options)[0]


def expected(p: kernel_run.Problem, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.attend(
        p.q,
        p.k,
        p.v,
        softmax_scale=p.softmax_scale,
        causal=p.causal,
        window=window,
        config=p.config,
        out_dtype=torch.bfloat16,
    )


def gaussian(seq: int, hq: int = 1, hkv: int = 1, context: int = 0, *, causal=True, lean=True, kind="gaussian", seed=0):
    return kernel_run.generate(kind, [(seq, context)], hq, hkv, causal, lean, seed)[0]
