#!/usr/bin/env python3
"""Runs the gfx950 fp8 head-dim-128 kernels on the emulator over the grid of shapes and inputs that they promise.

    python examples/gfx950_grid.py [--out FILE] [--kernels A,B] [--inputs A,B] [--seqs 1,63] [--heads 4/1,9/3]
                                   [--contexts 0,77] [--every-pair] [--fresh] [--json]

Every kernel, length, number of heads and context; and, for each kernel, input and number of heads, one ragged batch of
the lengths, packed and in shuffled pages. To keep it short, a length meets each pair of heads and context with one of
the inputs, in turn; lengths of 1,000 and more meet each number of heads and each context once, and only the batch of
one head holds them. --every-pair is the whole product.
Each case is what `zyfa kernels run` does, and passes if
  - the kernel's relative RMS error against fp64 is within 2% of the reference's own,
  - every element is within one bf16 step of the reference (V = 1: equal, and exactly 1),
  - the log-sum-exp is within 1e-3 of the reference.
FILE (JSON, default gfx950_grid.json) is kept up to date while it runs, and keeps what other options have measured; the
same command goes on where it stopped, or anew if the sources have changed or with --fresh. Exit status: 0 if all cases
asked for pass, 1 if one misses, 2 on bad arguments. All figures are emulated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

SEQS = (1, 63, 64, 65, 255, 256, 257, 1000, 2048)
HEADS = ((1, 1), (4, 1), (3, 1), (9, 3))
CONTEXTS = (0, 1, 77, 512)
PAGES = {(1, 1): 16, (4, 1): 64, (3, 1): 256, (9, 3): 16}  # tokens of a page in the ragged batches
FIGURES = ("rel_rms", "rel_rms_reference", "max_abs", "lse_max_abs", "beyond_bf16", "instructions")
LONG = 1000
SAVE_SECONDS = 20


@dataclass(frozen=True)
class Case:
    """One launch: a sequence, or a batch of them (lengths and contexts with commas between)."""

    kernel: str
    input: str
    seq: str
    context: str
    heads: str
    page: int | None

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return list(zip(map(int, self.seq.split(",")), map(int, self.context.split(",")), strict=True))


COLUMNS = (*Case.__dataclass_fields__, *FIGURES, "passed")


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The part of the grid that the options choose."""
    for kernel in options.kernels:
        for turn, kind in enumerate(options.inputs):
            for number, (q_heads, kv_heads) in enumerate(options.heads):
                heads = f"{q_heads}/{kv_heads}"
                shift = options.contexts[number % len(options.contexts) :] + options.contexts
                for place, seq in enumerate(options.seqs):
                    for offset, context in enumerate(options.contexts):
                        of_input = (place + number + offset) % len(options.inputs) == turn
                        if options.every_pair or of_input and (seq < LONG or context == shift[0]):
                            yield Case(kernel, kind, str(seq), str(context), heads, None)
                seqs = [seq for seq in options.seqs if seq < LONG or options.every_pair or q_heads == 1]
                if len(seqs) > 1:
                    contexts = (shift * len(seqs))[: len(seqs)]
                    for page in (None, PAGES.get((q_heads, kv_heads), 16)):
                        yield Case(kernel, kind, *(",".join(map(str, x)) for x in (seqs, contexts)), heads, page)


def run(case: Case) -> dict[str, Any]:
    """Figures of one case, and whether it passes."""
    from zyfa_kernels.runtime.registry import kernel

    from zyfa_backend import kernel_run

    made = kernel(case.kernel).properties
    q_heads, kv_heads = map(int, case.heads.split("/"))
    seed = int(hashlib.sha256(repr(case.lengths).encode()).hexdigest()[:6], 16)
    problems = kernel_run.generate(case.input, case.lengths, q_heads, kv_heads, made["causal"], made["lean"], seed)
    result = kernel_run.compare(case.kernel, problems, "emulator", case.page)
    if case.input == "ones":
        close = result["max_abs"] == 0 and result["rel_rms"] < 1e-12
    else:
        close = abs(result["rel_rms"] - result["rel_rms_reference"]) <= 0.02 * result["rel_rms_reference"]
    passed = close and result["beyond_bf16"] == 0 and result["lse_max_abs"] <= 1e-3
    return {**{name: result[name] for name in FIGURES}, "passed": passed}


def fingerprints(kernels: list[str]) -> dict[str, Any]:
    """SHA-256 of each kernel's instructions, and of all sources that a result depends on."""
    import zyfa_kernels
    from zyfa_kernels.runtime.registry import kernel

    import zyfa_backend

    def code(name: str) -> bytes:
        return "\n".join(item.text() for item in kernel(name).program.instructions()).encode()

    roots = [Path(module.__path__[0]) for module in (zyfa_kernels, zyfa_backend)]
    skip = {"vllm", "sglang", "compare", "commands", "models", "decode", "cycles", "checks"}
    files = [path for root in roots for path in sorted(root.rglob("*.py")) if not skip & set(path.parts)]
    return {
        "kernels": {name: hashlib.sha256(code(name)).hexdigest() for name in kernels},
        "sources": hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest(),
    }


def read(path: Path, prints: dict[str, Any]) -> dict[Case, dict[str, Any]]:
    """Results of an earlier run of the same sources; raises ValueError if the file is something else."""
    try:
        document = json.loads(path.read_text())
        rows = [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]
        known = document["sources"] == prints["sources"]
        done = {Case(*(row.pop(n) for n in Case.__dataclass_fields__)): row for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--out {str(path)!r} is not a result of this script ({error}), so it stays") from error
    return done if known else {}


def write(path: Path, prints: dict[str, Any], done: dict[Case, dict[str, Any]]) -> None:
    """The document with one row a line; replaces the file at once."""
    rows = [json.dumps([*astuple(case), *(figures[n] for n in (*FIGURES, "passed"))]) for case, figures in done.items()]
    head = {"figures": "emulated", "columns": COLUMNS, **prints}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def summary(done: dict[Case, dict[str, Any]]) -> dict[str, Any]:
    """Counts, the misses, and the largest distance of each kind."""
    ratios = [abs(f["rel_rms"] / f["rel_rms_reference"] - 1) for c, f in done.items() if c.input != "ones"]
    return {
        "cases": len(done),
        "missed": [{**vars(case), **figures} for case, figures in done.items() if not figures["passed"]],
        "largest_rel_rms_deviation": max(ratios, default=0.0),
        "largest_beyond_bf16": max(f["beyond_bf16"] for f in done.values()),
        "largest_lse_max_abs": max(f["lse_max_abs"] for f in done.values()),
        "largest_ones_max_abs": max((f["max_abs"] for c, f in done.items() if c.input == "ones"), default=0.0),
        "instructions": sum(f["instructions"] for f in done.values()),
    }


def arguments(argv: list[str]) -> argparse.Namespace:
    from zyfa_kernels.runtime.registry import names

    from zyfa_backend.kernel_run import INPUTS

    def several(convert):
        return lambda text: [convert(word) for word in text.split(",")]

    def one_of(known):
        def convert(word: str) -> str:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
            return word

        return convert

    def heads(word: str) -> tuple[int, int]:
        q, _, kv = word.partition("/")
        if not (q.isdigit() and kv.isdigit() and int(kv) and int(q) and int(q) % int(kv) == 0):
            raise argparse.ArgumentTypeError(f"{word!r} is not query heads / KV heads, such as 4/1")
        return int(q), int(kv)

    def at_least(least: int):
        def convert(word: str) -> int:
            if not word.isdigit() or int(word) < least:
                raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least {least}")
            return int(word)

        return convert

    ours = [name for name in names() if name.startswith("fp8-hd128-")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gfx950_grid.json"))
    parser.add_argument("--kernels", type=several(one_of(ours)), default=ours)
    parser.add_argument("--inputs", type=several(one_of(INPUTS)), default=list(INPUTS))
    parser.add_argument("--seqs", type=several(at_least(1)), default=list(SEQS))
    parser.add_argument("--heads", type=several(heads), default=list(HEADS))
    parser.add_argument("--contexts", type=several(at_least(0)), default=list(CONTEXTS))
    parser.add_argument("--every-pair", action="store_true", help="the whole product")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = arguments(argv)
    wanted, prints = list(cases(options)), fingerprints(options.kernels)
    kept: dict[Case, dict[str, Any]] = {}
    try:
        if options.out.exists():
            kept = read(options.out, prints)
        write(options.out, prints, kept)
    except (OSError, ValueError) as error:
        print(f"gfx950_grid: error: {error}", file=sys.stderr)
        return 2
    if options.fresh:
        kept = {}
    done = {case: kept[case] for case in wanted if case in kept}
    start = saved = time.monotonic()
    fresh = len(wanted) - len(done)
    for case in wanted:
        if case in done:
            continue
        done[case] = run(case)
        now, count = time.monotonic(), fresh - (len(wanted) - len(done))
        if now - saved > SAVE_SECONDS or len(done) == len(wanted) or not done[case]["passed"]:
            saved = now
            write(options.out, prints, {**kept, **done})
            word = "ok  " if done[case]["passed"] else "MISS"
            shape = " ".join(f"{name}={value}" for name, value in vars(case).items())
            print(f"{len(done)}/{len(wanted)} {word} {now - start:.0f} s, {count} run: {shape}", file=sys.stderr)
    write(options.out, prints, {**kept, **done})
    result = summary({case: done[case] for case in wanted})
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for miss in result["missed"]:
            print("missed:", miss)
        print(f"{result['cases']} cases, {len(result['missed'])} missed; the largest distances from the reference:")
        for name, value in result.items():
            if name.startswith("largest"):
                print(f"  {name.removeprefix('largest_'):<20} {value:.3g}")
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
